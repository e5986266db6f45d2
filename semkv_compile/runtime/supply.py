"""What a layer lacks in a step: taken from what was fetched ahead for it, the rest fetched by the step itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from semkv.runtime.prediction import token_keys
from semkv.runtime.prefetch import Fetch, Prefetcher, Source


@dataclass
class Supplied:
    """What one turn of one memory took. Tokens are counted over its KV heads.

    fetched: tokens that were fetched ahead for it, 0 where that failed or came too late. hits: tokens that it lacked and found among
    them. missed: tokens that it fetched itself. stalls: when it stood still for folded tokens or factors, from and to, in seconds
    of `time.perf_counter`. fetch: when the thread was at what it fetched.
    """

    fetched: int = 0
    hits: int = 0
    missed: int = 0
    stalls: list[tuple[float, float]] = field(default_factory=list)
    fetch: tuple[float, float] | None = None

    @property
    def stalled_seconds(self) -> float:
        """Time that the turn stood still."""
        return sum(to - begun for begun, to in self.stalls)

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Time a part of the turn in which nothing else is done."""
        begun = time.perf_counter()
        yield
        self.stalls.append((begun, time.perf_counter()))


class Supply:
    """A source for one turn: what `prefetcher` has fetched for it, and `host` for all else. Without them, the host alone."""

    def __init__(self, host: Source, prefetcher: Prefetcher | None = None, fetch: Fetch | None = None) -> None:
        self.told = Supplied()
        self._host, self._prefetcher, self._fetch = host, prefetcher, fetch

    def fill(
        self, rooms: Sequence[Tensor], at: Tensor, index: Tensor, heads: Tensor, *, threads: int | None = None
    ) -> None:
        """See `semkv.runtime.prefetch.Source`."""
        there = None
        if self._prefetcher is not None and self._fetch is not None and len(index):
            with self.told.stall():
                there = self._prefetcher.wait(self._fetch)
        if there is not None and self._fetch is not None:
            row, found = _find(token_keys(self._fetch.heads, self._fetch.places), token_keys(heads, index))
            for room, x in zip(rooms, there):
                room.index_copy_(0, at[found].to(room.device), x.index_select(0, row[found].to(x.device)))
            missing = ~found
            self.told.hits += len(index) - int(missing.sum())
            at, index, heads = at[missing], index[missing], heads[missing]
        if len(index):
            self.told.missed += len(index)
            with self.told.stall():
                self._host.fill(rooms, at, index, heads, threads=threads)

    def release(self) -> None:
        """The turn is done with what was fetched ahead."""
        fetch = self._fetch
        if self._prefetcher is None or fetch is None:
            return
        if fetch.arrived.is_set() and fetch.error is None:
            self.told.fetched, self.told.fetch = fetch.count, (fetch.began, fetch.ended)
        self._prefetcher.release(fetch)


def _find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Rows int64 [n] of `wanted` [n] among the ascending `keys` [m], and which of them are there; rows of the others are any."""
    if not len(keys):
        return torch.zeros_like(wanted), torch.zeros(len(wanted), dtype=torch.bool, device="cpu")
    row = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return row, keys[row] == wanted


__all__ = ["Supplied", "Supply"]
