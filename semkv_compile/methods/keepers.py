"""Which single tokens stay exact for good: sinks, and what an observation window attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.site import AttentionSite
from semkv.runtime.record import OBSERVED_QUERIES, RowRecord


@dataclass(frozen=True)
class Sinks:
    """The first `count` tokens, which soak up attention mass; everything else that fits is recent."""

    count: int = 4

    def keep(self, site: AttentionSite, record: RowRecord, room: int, page_size: int) -> tuple[Tensor, int]:
        count = min(self.count, record.tokens)
        pages = -(-count // page_size) * page_size
        return torch.arange(count), max(count, record.tokens - max(page_size, room - pages))


@dataclass(frozen=True)
class ObservationWindow:
    """The tokens that the prompt's last queries attend to most, chosen per KV head (SnapKV Sec. 3).

    window: queries that observe, at most 64; they stay exact themselves. kernel: width of the 1-D pooling of the scores,
    so that neighbours of a strong token are kept with it. pool: `max` or `mean`. Scores are softmax weights summed over
    the window and averaged over the query heads of a group.
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"

    def __post_init__(self) -> None:
        if not 1 <= self.window <= OBSERVED_QUERIES:
            raise ConfigError(f"window {self.window}: the observation window has 1 to {OBSERVED_QUERIES} queries")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"kernel {self.kernel}: the pooling width is odd and positive")

    def keep(self, site: AttentionSite, record: RowRecord, room: int, page_size: int) -> tuple[Tensor, int]:
        window = min(record.tokens, max(page_size, min(self.window, room // 4) // page_size * page_size))
        recent = record.tokens - window
        count = max(0, min(room - window, recent))
        if count == 0:
            return torch.zeros(1, 0, dtype=torch.int64), recent
        scores = self.scores(site, record, window)
        return scores.topk(count, dim=-1).indices.sort(dim=-1).values, recent

    def scores(self, site: AttentionSite, record: RowRecord, window: int) -> Tensor:
        """Pooled attention mass [Hkv, n - window] of the last min(window, 64) queries on the tokens before the window."""
        k = record.keys[site.store].float()
        n = k.shape[1]
        q = record.queries[site.index][:, -window:].float().cpu()
        queries = q.shape[1]
        grouped = q.unflatten(0, (site.kv_heads, site.group_size))
        logits = torch.einsum("hgtd,hnd->hgtn", grouped, k) * site.scale
        if site.softcap:
            logits = site.softcap * torch.tanh(logits / site.softcap)
        future = torch.arange(n)[None, :] > torch.arange(n - queries, n)[:, None]
        weights = logits.masked_fill(future, float("-inf")).softmax(dim=-1)[..., : n - window]
        mass = weights.sum(dim=2).mean(dim=1)
        pool = F.max_pool1d if self.pool == "max" else F.avg_pool1d
        return pool(mass, self.kernel, stride=1, padding=self.kernel // 2)
