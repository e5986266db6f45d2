"""What a retrieval head gives each token, computed from the paper's formulas, a token and a pair of dimensions at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from semkv.profiles.schema.retrieval_head import RetrievalHeadSection


def angles(section: RetrievalHeadSection, position: int) -> list[float]:
    """Of each pair of dimensions (i, i + D/2), with YaRN (Peng et al., 2023, Eq. 21-23)."""
    found = []
    for pair in range(section.head_dim // 2):
        own = section.theta ** (-2 * pair / section.head_dim)
        rotations = section.yarn.positions * own / (2 * math.pi)
        if rotations < section.yarn.slow:
            kept = 0.0
        elif rotations > section.yarn.fast:
            kept = 1.0
        else:
            kept = (rotations - section.yarn.slow) / (section.yarn.fast - section.yarn.slow)
        found.append(position * ((1 - kept) * own / section.yarn.factor + kept * own))
    return found


def rotated(x: Tensor, turns: list[float]) -> Tensor:
    """x [D] with its pairs turned."""
    out, half = x.clone(), len(turns)
    for pair, angle in enumerate(turns):
        a, b = float(x[pair]), float(x[pair + half])
        out[pair] = a * math.cos(angle) - b * math.sin(angle)
        out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def naive_weights(
    section: RetrievalHeadSection, tensors: Mapping[str, Tensor], embedding: Tensor, ids: Tensor, hidden: Tensor | None
) -> Tensor:
    """float32 [Hkv, n]: the largest softmax weight over the query group that the last of ids [n] gives each token (SpeContext Sec. 4.3).

    tensors: of the head, by their names without prefix; hidden [n, F]: features of the tokens themselves.
    """

    def normalised(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + section.epsilon).sqrt() * weight.float()

    def projected(place: int, name: str) -> Tensor:
        inputs = [normalised(embedding[ids[place]].float(), tensors["input_norm"])]
        if hidden is not None:
            before = hidden[place - 1].float() if place else torch.zeros_like(hidden[0]).float()
            given = tensors["projection"].float() @ before if section.projected else before
            inputs.append(normalised(given, tensors["feature_norm"]))
        heads = (tensors[name].float() @ torch.cat(inputs)).view(-1, section.head_dim)
        return torch.stack([rotated(head, angles(section, place)) for head in heads])

    n = len(ids)
    q = projected(n - 1, "query")
    k = [projected(place, "key") for place in range(n)]
    stretch = 0.1 * math.log(section.yarn.factor) + 1
    group = section.q_heads // section.kv_heads
    out = torch.zeros(section.kv_heads, n)
    for head in range(section.q_heads):
        logits = torch.stack([q[head] @ key[head // group] for key in k]) * stretch**2 / math.sqrt(section.head_dim)
        out[head // group] = torch.maximum(out[head // group], logits.softmax(0))
    return out


def assert_best(weights: Tensor, chosen: set[int], among: set[int]) -> None:
    """`chosen` are the tokens of `among` with the highest weights [n]; those at the cut may differ by the precision of stored keys."""
    assert 0 < len(chosen) < len(among)
    assert chosen <= among
    worst = min(float(weights[token]) for token in chosen)
    others = [float(weights[token]) for token in among - chosen]
    assert worst > 0.98 * max(others)
    assert sum(other > 0.98 * worst for other in others) < 0.1 * len(others), "weights are alike: nothing is told apart"
