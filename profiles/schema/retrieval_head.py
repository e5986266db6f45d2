"""SpeContext's retrieval head: the queries and keys of a one-layer model that foretells what a model will attend to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from .facts import MAX_DIM, MAX_SITES, Dim, Fraction, Heads, ModelFacts, Section

PREFIX = "retrieval_head."


class Yarn(Section):
    """YaRN (Peng et al., 2023): how rotary positions go beyond the length that a head was trained at.

    factor: how many times longer, 1 for no change. positions: the trained length L, tokens. fast, slow: a pair of dimensions
    that turns more than `fast` times within L keeps its frequency, one that turns less than `slow` times has it divided by
    the factor, those between are interpolated (Sec. 3.2; beta 32 and alpha 1).
    """

    factor: Annotated[float, Field(ge=1.0, le=1e6, allow_inf_nan=False)] = 1.0
    positions: int = Field(default=2048, ge=1)
    fast: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 32.0
    slow: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 1.0


class RetrievalHeadSection(Section):
    """A one-layer model pruned to what selection needs (SpeContext Sec. 4.3): norms, query and key projections.

    Its input is the token's embedding, which is the model's own and not stored, and, as in EAGLE-3, `features`: the hidden
    states with which the token *before* it entered some layers of the model. Tensors, with H = `hidden`, F = `features`,
    P = `projected` or else F where there is no projection, and I = H + P (P is 0 without features):

    `retrieval_head.input_norm` [H]; `retrieval_head.query` [Hq * D, I]; `retrieval_head.key` [Hkv * D, I]; with features
    `retrieval_head.feature_norm` [P], and where projected `retrieval_head.projection` [P, F].

    Attributes
    ----------
    hidden: width of the embedding. feature_sites: attention sites whose entering hidden states are joined, in this order; empty:
        the head reads embeddings alone. features, projected: see above.
    q_heads, kv_heads, head_dim: of the head; one selection per KV head.
    epsilon: of both norms. theta: base of the rotary positions, which turn the two halves of a head's dimensions. yarn: beyond
        the trained length.
    source: `distilled` from the model's attention, or imported from an `eagle-3` checkpoint.
    parameters: of the head. whole: of the one-layer model that it is pruned from (embedding, layer and vocabulary projection).
    caught, caught_batch: of the attention that `share` of the tokens can hold at best, what those chosen per KV head, or one
        choice for all heads, hold on held-out text; 0 where that was not measured.
    steps: optimiser steps, 0 where it was imported.
    """

    hidden: int = Field(ge=1, le=1 << 20)
    feature_sites: tuple[Annotated[int, Field(ge=0, lt=MAX_SITES)], ...] = Field(default=(), max_length=16)
    features: int = Field(default=0, ge=0, le=1 << 20)
    projected: int = Field(default=0, ge=0, le=1 << 20)
    q_heads: Heads
    kv_heads: Heads
    head_dim: Dim
    epsilon: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-5
    theta: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] = 1e4
    yarn: Yarn = Yarn()
    source: Literal["distilled", "eagle-3"] = "distilled"
    parameters: int = Field(ge=1)
    whole: int = Field(ge=1)
    caught: Fraction = 0.0
    caught_batch: Fraction = 0.0
    share: Fraction = 0.0
    steps: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _sound(self) -> RetrievalHeadSection:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions turn pairs of dimensions")
        if bool(self.feature_sites) != bool(self.features) or (self.projected and not self.features):
            raise ValueError(
                f"feature_sites {self.feature_sites}, features {self.features} and projected {self.projected} do not agree"
            )
        if self.q_heads * self.head_dim > 1 << 20 or self.head_dim > MAX_DIM:
            raise ValueError(f"{self.q_heads} heads of {self.head_dim} dimensions are too many")
        return self

    @property
    def inputs(self) -> int:
        """I: numbers that the projections read per token."""
        return self.hidden + (self.projected or self.features)

    @property
    def key_nbytes(self) -> int:
        """Bytes of one token's keys in half precision."""
        return 2 * self.kv_heads * self.head_dim

    def check(self, model: ModelFacts) -> None:
        """Raise `ValueError` where the features come from layers that the model does not have."""
        beyond = [site for site in self.feature_sites if site >= len(model.sites)]
        if beyond:
            raise ValueError(f"retrieval_head.feature_sites names site {beyond[0]} of {len(model.sites)} sites")

    def tensor_shapes(self, model: ModelFacts | None = None) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that this section needs."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{PREFIX}input_norm": (self.hidden,),
            f"{PREFIX}query": (self.q_heads * self.head_dim, self.inputs),
            f"{PREFIX}key": (self.kv_heads * self.head_dim, self.inputs),
        }
        if self.features:
            shapes[f"{PREFIX}feature_norm"] = (self.projected or self.features,)
        if self.projected:
            shapes[f"{PREFIX}projection"] = (self.projected, self.features)
        return shapes


@dataclass(frozen=True)
class RetrievalHead:
    """A section with its tensors, named without the section's prefix."""

    section: RetrievalHeadSection
    tensors: Mapping[str, Tensor] = field(compare=False)


def rotary_frequencies(section: RetrievalHeadSection) -> tuple[Tensor, float]:
    """(radians per position of each pair, float32 [D / 2]; factor on q.k), with YaRN's correction (Peng et al., Sec. 3.2-3.4).

    The factor is the square of 0.1 ln(s) + 1, by which YaRN stretches queries and keys.
    """
    half, yarn = section.head_dim // 2, section.yarn
    plain = section.theta ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    if yarn.factor == 1.0:
        return plain.float(), 1.0
    turns = yarn.positions * plain / (2 * math.pi)
    kept = ((turns - yarn.slow) / (yarn.fast - yarn.slow)).clamp(0, 1)
    return (plain * (kept + (1 - kept) / yarn.factor)).float(), (0.1 * math.log(yarn.factor) + 1) ** 2


def group_scores(logits: Tensor) -> Tensor:
    """How much each KV head of the retrieval head attends to each token: logits [Hkv, G, T, m] of its query heads to the logarithm
    of the largest softmax weight of the group, [Hkv, T, m] (SpeContext Sec. 4.3). It is distilled with the scores that choose."""
    logs = logits.log_softmax(-1)
    return logs[:, 0] if logs.shape[1] == 1 else logs.amax(1)


def matched_heads(weights: Tensor, heads: int) -> Tensor:
    """Weights [H, ...] of some KV heads as those of `heads` KV heads: as they are, each for several heads, or the largest of
    several; where neither number divides the other, the largest of all for each."""
    have = weights.shape[0]
    if heads == have:
        return weights
    if heads % have == 0:
        return weights.repeat_interleave(heads // have, 0)
    if have % heads == 0:
        return weights.unflatten(0, (heads, -1)).amax(1)
    return weights.amax(0, keepdim=True).repeat_interleave(heads, 0)


def matches(have: int, heads: int) -> tuple[tuple[int, ...], ...]:
    """For each of `heads` KV heads, those of `have` that `matched_heads` takes the largest weight of."""
    if heads % have == 0:
        return tuple((head // (heads // have),) for head in range(heads))
    each = have // heads if have % heads == 0 else 0
    return tuple(tuple(range(head * each, (head + 1) * each)) if each else tuple(range(have)) for head in range(heads))
