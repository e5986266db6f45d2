"""Whole chunks of neighbouring tokens are kept or dropped, by the votes of the prompt's end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import OncePerPrompt
from semkv.methods.keepers import WindowKeeper
from semkv.methods.options import Count, Queries, Tokens, TokensOrNone
from semkv.methods.window_scores import mean_of_heads
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components
from semkv.runtime.prompt.record import RowRecord


@dataclass(frozen=True)
class ChunkVotes(WindowKeeper):
    """Chunks of `size` tokens by the votes that they receive together, one choice for all KV heads of a layer.

    leaders: for each KV store the site whose attention decides; stores that are not in it decide for themselves.
    """

    alike: ClassVar[bool] = True
    size: int = 10
    leaders: dict[int, AttentionSite] = field(default_factory=dict)

    def scores(self, site: AttentionSite, record: RowRecord, tail: int) -> Tensor:
        """Attention summed over the window and averaged over the heads of the deciding layer, [1, n - tail]."""
        leader = self.leaders.get(site.store, site)
        return mean_of_heads(leader, self.weights(leader, record, tail).sum(dim=2).flatten(0, 1))[None]

    def choose(self, scores: Tensor, count: int) -> Tensor:
        """The chunks with the largest sums, whole; the last may be short."""
        votes = torch.nn.functional.pad(scores[0], (0, -scores.shape[1] % self.size)).unflatten(0, (-1, self.size))
        best = votes.sum(1).topk(min(count // self.size, len(votes))).indices.sort().values.cpu()
        tokens = (best[:, None] * self.size + torch.arange(self.size, dtype=torch.int64, device="cpu")).flatten()
        return tokens[tokens < scores.shape[1]][None]


@dataclass(frozen=True)
class ChunkKV(OncePerPrompt):
    """ChunkKV (Liu et al., 2025): the unit of eviction is a chunk, which keeps phrases whole, and neighbouring layers share
    their choice.

    chunk: tokens of a chunk. reuse: layers that use the choice of the first of them; 1: each its own. window: observing
    queries. recent: last tokens that stay exact.
    """

    chunk: Tokens = 10
    reuse: Count = 2
    window: Queries = 8
    recent: TokensOrNone = 32

    name: ClassVar[str] = "chunkkv"
    minimum_tokens: ClassVar[int] = 24

    def components(self, program: Program, profile: Profile | None) -> Components:
        stores = [store for store in program.stores if store.treatment == "method"]
        leaders = {store.store: stores[place - place % self.reuse] for place, store in enumerate(stores)}
        votes = ChunkVotes(self.window, 1, "max", self.recent, self.chunk, leaders)
        return Components(keeper=votes, reads_others=self.reuse > 1)
