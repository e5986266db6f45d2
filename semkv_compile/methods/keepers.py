"""Which single tokens stay exact for good: sinks, and what an observation window attends to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.site import AttentionSite
from semkv.methods.window_scores import Pool, observed_weights, pooled
from semkv.runtime.prompt.record import OBSERVED_QUERIES, RowRecord


@dataclass(frozen=True)
class Sinks:
    """The first `count` tokens, which soak up attention mass; everything else that fits is recent."""

    count: int = 4
    alike: ClassVar[bool] = True
    """Whether all heads of a layer keep the same tokens."""

    def keep(self, site: AttentionSite, record: RowRecord, room: int, page_size: int) -> tuple[Tensor, int]:
        count = min(self.count, record.tokens)
        pages = -(-count // page_size) * page_size
        return torch.arange(count, dtype=torch.int64, device="cpu"), max(
            count, record.tokens - max(page_size, room - pages)
        )


@dataclass(frozen=True)
class WindowKeeper(ABC):
    """Tokens chosen by how the prompt's last queries look at them; subclasses score and choose.

    window: queries that observe, at most 64; they stay exact themselves. kernel: odd width of the 1-D pooling of scores, so
    that neighbours of a strong token are kept with it. pool: `max` or `mean`. recent: the last tokens that stay exact, where
    that is more than `window`. The budget shrinks what stays, and observes, to half of the room; a row that is in the middle of
    its text has half of it for the last tokens.
    """

    window: int = 32
    kernel: int = 7
    pool: Pool = "max"
    recent: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.window <= OBSERVED_QUERIES:
            raise ConfigError(f"window {self.window}: the observation window has 1 to {OBSERVED_QUERIES} queries")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"kernel {self.kernel}: the pooling width is odd and positive")

    def keep(self, site: AttentionSite, record: RowRecord, room: int, page_size: int) -> tuple[Tensor, int]:
        wanted = room // 2 if record.going_on else min(max(self.window, self.recent), room // 2)
        tail = min(record.tokens, max(page_size, wanted // page_size * page_size))
        before = record.tokens - tail
        count = max(0, min(room - tail, before))
        if count == 0:
            return torch.zeros(1, 0, dtype=torch.int64, device="cpu"), before
        return self.choose(self.scores(site, record, tail), count), before

    def weights(self, site: AttentionSite, record: RowRecord, tail: int) -> Tensor:
        """[Hkv, G, w, n - tail]: attention of the observing queries on the tokens before the last `tail`."""
        return observed_weights(site, record, min(self.window, tail))[..., : record.tokens - tail]

    @abstractmethod
    def scores(self, site: AttentionSite, record: RowRecord, tail: int) -> Tensor:
        """Scores [Hkv|1, n - tail] of the tokens before the last `tail`."""

    def choose(self, scores: Tensor, count: int) -> Tensor:
        """int64 [Hkv|1, at most count], ascending, on the host: the best by score."""
        return scores.topk(count, dim=-1).indices.sort(dim=-1).values.cpu()


@dataclass(frozen=True)
class ObservationWindow(WindowKeeper):
    """SnapKV Sec. 3, per KV head: softmax weights summed over the window, averaged over the query heads of a group, pooled."""

    def scores(self, site: AttentionSite, record: RowRecord, tail: int) -> Tensor:
        mass = self.weights(site, record, tail).sum(dim=2).mean(dim=1)
        return pooled(mass, self.kernel, self.pool)
