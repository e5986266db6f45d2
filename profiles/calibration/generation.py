"""Greedy generation with a plain KV cache and a look at every attention: what retrieval scores are measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.program import Program

from .interpreter import SiteCall, full_attention, run_body
from .weights import attention_weights

Watcher = Callable[[int, Tensor], None]
"""Called with a site's index and the weights [Hq, T, n] of the tokens that were just read on all so far."""


@dataclass
class _Cache:
    k: Tensor
    v: Tensor


class CachedReader:
    """Reads tokens in parts, as a decoder with the full cache does. Memory: one KV cache of `capacity` tokens."""

    def __init__(self, program: Program, capacity: int) -> None:
        self.program, self.capacity = program, capacity
        self.length = 0
        self.caches: dict[int, _Cache] = {}
        self.device = next((p.device for p in program.body.parameters()), torch.device("cpu"))

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = min(self.length, length)

    @torch.no_grad()
    def read(self, ids: Tensor, watch: Watcher | None = None) -> Tensor:
        """Logits [vocab] behind the last of ids [T]; `watch` sees the weights, except while the cache is empty."""
        start, stop = self.length, self.length + len(ids)
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens do not fit into a cache of {self.capacity}")
        positions = torch.arange(start, stop, dtype=torch.int64, device=self.device)
        seen = torch.arange(stop, dtype=torch.int64, device=self.device)

        def attend(call: SiteCall) -> Tensor:
            cache = self._store(call, start, stop)
            if not start:
                return full_attention(call)
            weights = attention_weights(call, cache.k[:, :stop], seen)
            if watch is not None:
                watch(call.site, weights)
            grouped = weights.unflatten(0, (cache.v.shape[0], -1))
            return torch.einsum("hgtn,hnd->hgtd", grouped, cache.v[:, :stop].float()).flatten(0, 1)

        hidden = run_body(self.program.body, ids.to(self.device), positions, attend)
        self.length = stop
        return self.program.head(hidden[None, -1:])[0, 0].float()

    def _store(self, call: SiteCall, start: int, stop: int) -> _Cache:
        cache = self.caches.get(call.site)
        if cache is None:
            empty = [x.new_empty((x.shape[0], self.capacity, x.shape[2])) for x in (call.k, call.v)]
            cache = self.caches[call.site] = _Cache(*empty)
        cache.k[:, start:stop], cache.v[:, start:stop] = call.k, call.v
        return cache
