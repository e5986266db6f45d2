"""Every setting of a calibration, validated, with a JSON round trip."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import Field

from semkv.settings import Settings


class CalibrationSettings(Settings):
    """Settings of SeKV's training; defaults are the paper's (Sec. 3.3, App. A) unless said otherwise.

    Attributes
    ----------
    length: tokens of context.
    queries: tokens that follow a context, and as many of its own and of those that are trained on: drawn by how much of their attention
        is far.
    max_steps: optimiser steps of each layer, `batch` queries of one context each. gate_steps: of the rank gates.
    sequences, held_out: contexts that are trained on, and others that decide which parameters are kept and when to stop.
    evaluate_every: steps between evaluations; 0 takes a tenth of `max_steps`.
    patience: evaluations that catch no more of the held-out attention after which a layer's training stops; counted once the budget
        loss has its full weight.
    learning_rate, weight_decay, warmup: of AdamW with cosine decay; `warmup` is a share of the steps. gate_rate: the
        rate of the rank gates.
    threshold_rate: factor on the learning rate of thresholds and offsets. Ours: they are logits that have to travel several units.
    lambda_zoom, lambda_recon, lambda_budget, beta: weights of Eq. 10 and 15; only `lambda_budget` is annealed. The output error is a
        share of each head's output, larger than the paper's KL, so that zooming has a larger price (the paper: 0.1, beta 0.1).
    lambda_rank: weight of the ranking term, ours; 0 trains with the paper's losses alone.
    positive_weight, coverage: w+ and rho of Eq. 12-13.
    mined_mass, mined_share: a query position of a head is mined for Eq. 13 when at least `mined_mass` of its teacher
        attention lies in far spans and at most `mined_share` of them cover rho of that.
    threshold_start: tau at the start, a probability.
    routing_dim: d', at most half of the head dim.
    max_rank: R_max. gate_hidden: width of the rank-gate network.
    gate_floor: components with a smaller gate are dropped when factors are stored.
    summary_bits: bits of the span means that routing and folded attention read, as at run time.
    budgets: device budgets for which contexts are divided, in turn.
    router_init: `covariance`: W starts as the best projection of q.k to `routing_dim` rows under the measured second moments; `random`:
        normal entries; `identity`: W is square and starts as the identity. A summary costs nothing on the device, since it
        follows from the mean key that the coarse entry keeps anyway.
    """

    length: int = Field(default=8192, ge=64)
    queries: int = Field(default=64, ge=4)
    max_steps: int = Field(default=150, ge=1)
    batch: int = Field(default=32, ge=1)
    gate_steps: int = Field(default=300, ge=1)
    held_out: int = Field(default=2, ge=1)
    sequences: int = Field(default=8, ge=1)
    evaluate_every: int = Field(default=0, ge=0)
    patience: int = Field(default=3, ge=1)
    learning_rate: float = Field(default=3e-2, gt=0)
    gate_rate: float = Field(default=4e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup: float = Field(default=0.1, ge=0, le=1)
    threshold_rate: float = Field(default=3.0, gt=0)
    lambda_zoom: float = Field(default=1.0, ge=0)
    lambda_rank: float = Field(default=3.0, ge=0)
    lambda_recon: float = Field(default=0.5, ge=0)
    lambda_budget: float = Field(default=1.0, ge=0)
    beta: float = Field(default=0.01, ge=0)
    positive_weight: float = Field(default=10.0, gt=0)
    coverage: float = Field(default=0.9, gt=0, le=1)
    mined_mass: float = Field(default=0.2, ge=0, le=1)
    mined_share: float = Field(default=0.25, gt=0, le=1)
    threshold_start: float = Field(default=0.05, gt=0, lt=1)
    routing_dim: int = Field(default=32, ge=1, le=256)
    max_rank: int = Field(default=32, ge=1, le=256)
    gate_hidden: int = Field(default=64, ge=1, le=256)
    gate_floor: float = Field(default=0.1, ge=0, lt=1)
    summary_bits: Literal[4, 8] = 4
    budgets: tuple[float, ...] = Field(default=(0.1, 0.05, 0.2), min_length=1)
    router_init: Literal["identity", "covariance", "random"] = "covariance"
    seed: int = 0

    @property
    def evaluation_interval(self) -> int:
        return self.evaluate_every or max(1, self.max_steps // 10)

    def identity(self) -> str:
        """A hash of all settings: a checkpoint made with others cannot be resumed."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()
