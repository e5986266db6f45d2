"""What a row fetches ahead of its layers: a thread and a few buffers, which the layers use in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.components import Foresight
from semkv.runtime.prefetch import Prefetcher, Wanted
from semkv.runtime.supply import Supply

if TYPE_CHECKING:
    from semkv.runtime.row_memory import RowMemory
    from semkv.runtime.site_memory import SiteMemory

LAYERS = 2
"""Layers ahead of the running one whose fetches are under way: while one is computed, the next two are on their way."""

SHARE = 1 / 4
"""Of what a layer unfolds, the tokens that are fetched ahead at most. Where 95 % of a step's tokens were there and the others came from
just below the cut, this holds 96 % of those."""

LEAST = 64
"""Tokens of each KV head that a buffer holds at least."""


class Lookahead:
    """Begins the fetches of one row, `LAYERS` turns ahead; behind the last layer the first ones of the next step follow.

    What is fetched for a layer is what its memory foresees in this step where its router can tell
    (`semkv.runtime.components.Foresight`), else what its last step makes likely. The buffers are a constant beside the budget,
    sized when the row takes its first step. Layers whose tokens are held otherwise than the first one's fetch for themselves.
    """

    def __init__(self, prefetcher: Prefetcher, turns: tuple[AttentionSite, ...]) -> None:
        self.prefetcher, self.turns = prefetcher, turns
        self._place = {site.index: place for place, site in enumerate(turns)}

    @classmethod
    def of(cls, row: RowMemory, tokens: int) -> Lookahead | None:
        """For a row that will have `tokens` tokens after this step; None where nothing that stays between steps is unfolded, or
        nothing is known of it ahead and guesses are not wanted."""
        placement, rooms = row.placement, {}
        for store in placement.budgeted:
            memories = row.stores[store.store]
            told = [placement.guesses or isinstance(m.components.router, Foresight) for m in memories]
            if not any(told):
                continue
            for memory, room, is_told in zip(memories, row.workspace_allowance(store, tokens), told):
                if is_told and memory.unfolds_ahead and room < float("inf"):
                    rooms[memory] = memory.unfolded_tokens(room)
        if not rooms:
            return None
        first = next(iter(rooms)).site
        kinds = next(iter(rooms)).spans.room_kinds
        same = {m: room for m, room in rooms.items() if m.spans.room_kinds == kinds}
        capacity = max(LEAST * first.kv_heads, int(SHARE * max(same.values())))
        turns = tuple(
            site for site in placement.program.sites if any(m in same for m in row.stores.get(site.store, ()))
        )
        for memory in same:
            foreseen = isinstance(memory.components.router, Foresight) and memory not in row.stores[turns[0].store]
            memory.ahead, memory.guesses = capacity, not foreseen
        parts = max(sum(m in same for m in row.stores[site.store]) for site in turns)
        buffers = parts * min(LAYERS, len(turns))
        return cls(Prefetcher(capacity, kinds, placement.device, buffers=buffers), turns)

    @property
    def nbytes(self) -> int:
        """Device bytes of the buffers."""
        return self.prefetcher.nbytes

    def begin(self, row: RowMemory, ids: Tensor) -> None:
        """A step over ids [T] begins: fetch for its first layers what the step before did not."""
        for site in self.turns[:LAYERS]:
            self._submit(row, site, ids, foresee=True)

    def advance(self, row: RowMemory, site: AttentionSite, ids: Tensor) -> None:
        """The turn of `site` is over, and its buffers are free: fetch for the layers after it for which nothing is under way."""
        place = self._place.get(site.index)
        if place is not None:
            for after in range(place + 1, place + 1 + LAYERS):
                self._submit(row, self.turns[after % len(self.turns)], ids, foresee=after < len(self.turns))

    def _submit(self, row: RowMemory, site: AttentionSite, ids: Tensor, *, foresee: bool) -> None:
        store, memories = row.placement.stores[site.store], row.stores[site.store]
        waiting = [m for m in memories if m.ahead and m.supply is None and m.spans is not None and m.spans.count]
        if not waiting or not self.prefetcher.works:
            return
        step = row.step_of(site, ids, torch.zeros(site.q_heads, len(ids), 0, dtype=torch.float32, device="cpu"))
        for number, (part, memory) in enumerate(zip(row.placement.parts(store), memories)):
            if memory not in waiting or memory.on_device:
                continue
            own, wanted = site.part(part.first, part.last, 1.0), memory.likely
            router = memory.components.router
            if isinstance(router, Foresight):
                if foresee and router.foresees(own, step):
                    room = row.workspace_allowance(store, row.tokens + len(ids))[number]
                    wanted = memory.foresee(own, room, step)
                elif site is not self.turns[0]:
                    wanted = None  # it will be known in time; for the first layer nothing is
            self._fetch(memory, wanted)

    def _fetch(self, memory: SiteMemory, wanted: Wanted | None) -> None:
        assert memory.spans is not None
        host = memory.spans.host_tokens
        fetch = None if wanted is None else self.prefetcher.submit(host, wanted)
        if fetch is not None:
            memory.supply = Supply(host, self.prefetcher, fetch)


__all__ = ["Lookahead"]
