"""Every setting of the measured calibration steps: taxonomy, retrieval heads, layer errors, sketch."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import Field, model_validator

from semkv.settings import Settings


class MeasureSettings(Settings):
    """Settings of the steps that measure; defaults are the papers' unless said otherwise. How much is measured is ours: as little as
    leads to the same heads (docs/calibration.md).

    Attributes
    ----------
    length: tokens of context per sample (HeteroCache: 10,000). steps: tokens that follow it, one decode step each.
    samples: contexts in all, spread over the data sets, at most (HeteroCache: 50). agreement: taxonomy and needle tests stop before
        that when the even and the odd ones among `least` and more agree so well that the correlation of all of them with as many others
        would be this high; 1 measures all. held_out: contexts per data set that layer errors and what codes
        catch are measured on.
    block: queries whose attention is looked at together: memory is one layer's [heads, block, tokens].
    top_share: k of HeteroCache's top-k sets over the context's length (1K of 10K). pool: width of the average pooling.
    tau_stable, tau_similar: its thresholds (0.4 and 0.5 for Qwen).
    needle_lengths, needle_depths: contexts of needle tests, as lengths times depths (CompressKV: 20 and 10), one needle of each
        kind in each.
    needle_questions: questions about each context, where its text holds more than one needle.
    pass_recall: a test counts when more than this share of the answer's tokens was generated (ROUGE-1 recall 50).
    classic_top_k: k of the classic top-k retrieval score. Ours: the paper gives none.
    keep: tokens that layer errors keep of a context. observation: those of them that are its last, and choose the rest.
    selectors: query heads per layer that choose, those with the best semantic scores; all where there are no scores.
    epsilon: of Eq. 8.
    sketch_stages, sketch_value_stages: codebooks per KV head for keys and for values, and bytes of their codes; 0 for keys: one for each
        16 of a head's dimensions, 4 to 16. sketch_vectors: keys that a head's codebooks are learned from, over all samples.
        sketch_rounds: of k-means per codebook. sketch_rank: directions in which keys are compared; 0: half of the head's dimensions, at
        most 64. sketch_share: tokens that a code has to find, over the context's. sketch_records: contexts of identifiers, numbers and
        addresses (`records`) that codebooks are learned from beside the text.
    device_memory: bytes of the device that thresholds are for; None: of the CUDA device that the model is on, else 24 GB.
    memory_rows, memory_budget: R sequences and B selected tokens per KV head and layer that they are for (SpeContext: 2048).
    head_input: what SpeContext's retrieval head reads: embeddings and the `features` of the token before, as EAGLE-3 does, or the
        `embedding` alone. head_sites: sites whose entering hidden states are the features; empty: EAGLE-3's low, middle and high
        layer, of a model with few layers the second. head_dim, head_group: dimensions and query heads per KV head; 0: the model's.
    head_rounds: times that each sample is read, head_steps: optimiser steps on each. head_rate: of AdamW, with warm-up and
        cosine decay. head_near: tokens this near are exact anyway, and not to be foretold. head_floor: nor are tokens with less
        than so many even shares of attention.
    """

    length: int = Field(default=8192, ge=64)
    steps: int = Field(default=100, ge=1)
    samples: int = Field(default=9, ge=1)
    agreement: float = Field(default=0.99, gt=0, le=1)
    least: int = Field(default=6, ge=2)
    held_out: int = Field(default=1, ge=1)
    block: int = Field(default=32, ge=1)
    top_share: float = Field(default=0.1, gt=0, le=1)
    pool: int = Field(default=5, ge=1)
    tau_stable: float = Field(default=0.5, ge=0, le=1)
    tau_similar: float = Field(default=0.5, ge=0, le=1)
    needle_lengths: int = Field(default=4, ge=1)
    needle_depths: int = Field(default=5, ge=1)
    needle_questions: int = Field(default=3, ge=1)
    pass_recall: float = Field(default=0.5, ge=0, lt=1)
    classic_top_k: int = Field(default=10, ge=1)
    keep: int = Field(default=32, ge=1)
    observation: int = Field(default=8, ge=1)
    selectors: int = Field(default=4, ge=1)
    epsilon: float = Field(default=1e-6, gt=0)
    sketch_stages: int = Field(default=0, ge=0, le=16)
    sketch_value_stages: int = Field(default=1, ge=1, le=16)
    sketch_vectors: int = Field(default=16384, ge=256)
    sketch_rounds: int = Field(default=12, ge=1)
    sketch_rank: int = Field(default=0, ge=0)
    sketch_share: float = Field(default=0.05, gt=0, le=1)
    sketch_records: int = Field(default=3, ge=0)
    head_input: Literal["features", "embedding"] = "features"
    head_sites: tuple[int, ...] = ()
    head_dim: int = Field(default=0, ge=0, le=1024)
    head_group: int = Field(default=0, ge=0, le=256)
    head_rounds: int = Field(default=1, ge=1)
    head_steps: int = Field(default=20, ge=1)
    head_rate: float = Field(default=1e-2, gt=0)
    head_near: int = Field(default=64, ge=1)
    head_floor: float = Field(default=4.0, ge=0)
    device_memory: int | None = Field(default=None, ge=1)
    memory_rows: int = Field(default=1, ge=1)
    memory_budget: int = Field(default=2048, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _belong_together(self) -> MeasureSettings:
        if self.observation > self.keep:
            raise ValueError(
                f"setting observation = {self.observation}: these tokens are part of keep = {self.keep}, so give at most that"
            )
        if self.pool % 2 == 0:
            raise ValueError(f"setting pool = {self.pool}: expected an odd width, so that it has a middle")
        if self.keep >= self.length:
            raise ValueError(
                f"setting keep = {self.keep}: a context has {self.length} tokens, so nothing would be dropped"
            )
        return self

    def key_bytes(self, dim: int) -> int:
        """Codebooks for keys of `dim` dimensions."""
        return self.sketch_stages or min(max(dim // 16, 4), 16)

    def directions(self, dim: int) -> int:
        """In which keys of `dim` dimensions are compared."""
        return self.sketch_rank or min(-(-dim // 2), 64)

    def identity(self) -> str:
        """A hash of all settings."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()
