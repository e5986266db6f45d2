"""Layers share the budget by how spread and how unsteady their attention is; tokens stay by mean and variance of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import OncePerPrompt
from semkv.methods.keepers import WindowKeeper
from semkv.methods.options import AboveZero, FromZero, Queries, Width
from semkv.methods.window_scores import mean_of_heads, pooled
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components, Plan
from semkv.runtime.prompt.record import RowRecord


def _variance(weights: Tensor) -> Tensor:
    """Variance over the window's queries, [..., w, n] -> [..., n]; zero where there is one query."""
    return weights.var(dim=-2, correction=min(1, weights.shape[-2] - 1))


@dataclass(frozen=True)
class SteadyVotes(WindowKeeper):
    """CAKE's eviction indicator: mean attention plus `gamma` times its variance over the window, pooled, per KV head."""

    gamma: float = 200.0

    def scores(self, site: AttentionSite, record: RowRecord, tail: int) -> Tensor:
        weights = self.weights(site, record, tail)
        return pooled(weights.mean(dim=2) + self.gamma * _variance(weights), self.kernel, self.pool).mean(dim=1)


@dataclass(frozen=True)
class LayerPreference:
    """CAKE's allocation: the window in every layer, the rest by preference H^(1/tau1) * V^(1/tau2).

    H: entropy of the window's attention on the tokens before it. V: its variance over the window's queries, summed over
    those tokens. Both are means over query heads, and H is one over queries too.
    """

    keeper: SteadyVotes
    tau1: float = 1.0
    tau2: float = 1.0

    def preference(self, site: AttentionSite, record: RowRecord) -> float:
        """P of one layer; 0 where the prompt ends within the window."""
        if record.tokens <= self.keeper.window:
            return 0.0
        weights = self.keeper.weights(site, record, self.keeper.window)
        spread = -(weights * (weights + 1e-10).log()).sum(dim=-1).flatten(0, 1).mean(dim=1)
        entropy = mean_of_heads(site, spread)
        change = mean_of_heads(site, _variance(weights).sum(dim=-1).flatten())
        return float(entropy.clamp(min=0) ** (1 / self.tau1) * change ** (1 / self.tau2))

    def shares(self, stores: tuple[AttentionSite, ...], record: RowRecord, budget: float) -> tuple[float, ...]:
        wishes = torch.tensor([self.preference(store, record) for store in stores], dtype=torch.float64, device="cpu")
        total = float(wishes.sum())
        even = 1 / len(stores)
        if not total > 0:
            return (even,) * len(stores)
        window = min(1.0, self.keeper.window / budget)
        return tuple((window * even + (1 - window) * wishes / total).tolist())


@dataclass(frozen=True)
class CAKE(OncePerPrompt):
    """CAKE (Qin et al., 2025): each prompt divides the budget among layers by the entropy and the change of their attention,
    and tokens whose attention changes stay before those that are looked at evenly.

    tau1, tau2: temperatures of entropy and variance, which the authors search per model (1.6 and 0.4 for Llama 3.1 8B).
    gamma: weight of the variance in the indicator. window: observing queries. kernel: width of the mean pooling, odd.
    adaptive: False divides the budget evenly (ablation).
    """

    tau1: AboveZero = 1.0
    tau2: AboveZero = 1.0
    gamma: FromZero = 200.0
    window: Queries = 32
    kernel: Width = 5
    adaptive: bool = True

    name: ClassVar[str] = "cake"
    minimum_tokens: ClassVar[int] = 24

    def _keeper(self) -> SteadyVotes:
        return SteadyVotes(self.window, self.kernel, "mean", 0, self.gamma)

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components(keeper=self._keeper())

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        plan = super().plan(program, profile)
        return replace(plan, allocator=LayerPreference(self._keeper(), self.tau1, self.tau2)) if self.adaptive else plan
