"""Heavy hitters: the tokens that attention has added up to most so far, and the newest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv.ir import state_ops
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.options import Inner
from semkv.methods.window_scores import attention_received, softmax_weights
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components, ExactKeys
from semkv.runtime.prompt.record import RowRecord


@dataclass(frozen=True)
class HeavyHitters:
    """Scores are attention summed over all queries so far, averaged over the query heads of a group. heavy: share of the room
    that the highest take."""

    heavy: float = 0.5

    def places(self, room: int, page_size: int) -> int:
        return min(int(room * self.heavy) // page_size, room // page_size - 1) * page_size

    def scores(self, site: AttentionSite, record: RowRecord) -> Tensor:
        return attention_received(site, record)

    def added(self, site: AttentionSite, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
        return softmax_weights(site, q, k, hidden).sum(dim=2).mean(dim=1)

    def given(self, site: AttentionSite, q: Tensor, held: Sequence[ExactKeys], asked: Tensor) -> list[Tensor]:
        logits = []
        for keys in held:
            own = state_ops.products(q * site.scale, keys.k, keys.scale, 16 if keys.scale is None else 8)
            own = site.softcap * torch.tanh(own / site.softcap) if site.softcap else own
            hidden = keys.positions > asked[:, :, None]  # [B, Hkv|1, n]
            logits.append(own.masked_fill(hidden[:, :, None], float("-inf")))
        mass = torch.stack([own.logsumexp(-1) for own in logits]).logsumexp(0)[..., None]
        return [(own - mass).exp().mean(2) for own in logits]


@dataclass(frozen=True)
class H2O(Method):
    """H2O (Zhang et al., 2023): half of the budget for the tokens with the most accumulated attention, half for the newest.

    Scores go on accumulating in generation: whenever a token leaves the newest, the lowest-scored of it and the heavy ones
    goes, per KV head (Alg. 1). Each exact token's score is charged to the budget. heavy: share of the heavy hitters.
    """

    heavy: Inner = 0.5

    name: ClassVar[str] = "h2o"
    minimum_tokens: ClassVar[int] = 24

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components(evictor=HeavyHitters(self.heavy), reads_queries=True)
