"""The memory of a prompt that is being read, in one chunk or several: what fills a `RowRecord`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.ir.memory import Entries
from semkv.ir.program import Program
from semkv.runtime.host.copies import DeviceCopies
from semkv.runtime.host.tier import HostTier
from semkv.runtime.prompt.content import Contents
from semkv.runtime.prompt.record import OBSERVED_QUERIES, RowRecord


class Recorder(Contents):
    """Keeps what a prompt's chunks leave in the host tier, and gives later chunks the exact keys and values of earlier ones.

    The first chunk runs through the prefill program, which attends to its own tokens, later ones through the extend program.
    What several chunks attend to is held in the dtype in which it was computed and converted at the end (`finish`), so that the
    record does not depend on the chunks but for the order of sums. On a CPU attention reads the tier in place; on a device one
    layer's earlier tokens are copied there at a time, and those of the chunk go to the host while the next layer runs.
    """

    def __init__(
        self,
        program: Program,
        record: RowRecord,
        dtype: torch.dtype,
        tier: HostTier,
        device: torch.device,
        *,
        tokens: int | None = None,
    ) -> None:
        """tokens: of the whole prompt; None: nobody knows yet, so that what is kept is made larger on the way and copied at the end."""
        self.made, self.tokens = record, tokens
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        record.keys, record.values = self.keys, self.values
        self.dtype, self.tier, self.device = dtype, tier, device
        self.sites = program.sites
        self.owners = {store.index for store in program.stores}
        self.copies = DeviceCopies(device)
        self.past = 0

    def record(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Keep one site's row 0 of the first chunk; see `semkv.ir.memory.Memory.record`."""
        self._keep_queries(site, q[0])
        if site in self.owners:
            store = self.sites[site].store
            self._keep(self.keys, store, k[0])
            self._keep(self.values, store, v[0])

    def entries(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Entries:
        """Keep one site's row 0 of a later chunk, and return all tokens so far, or those within its window."""
        self.record(site, q, k, v, positions)
        place = self.sites[site]
        first = max(0, self.past + 1 - place.window) if place.window else 0
        end = self.past + k.shape[2]
        keys, values = (
            self._so_far(held[place.store], new[0], first, end) for held, new in ((self.keys, k), (self.values, v))
        )
        places = torch.arange(first, end, dtype=torch.int64, device=positions.device)
        if self.content is not None and self.content.blocks:
            places = places.clamp(max=self.past)  # tokens that attend both ways are seen by the first of them
        return Entries([keys[None]], [values[None]], [places[None, None]])

    def observe(self, site: int, hidden: Tensor) -> None:
        """Keep the hidden states of row 0; see `semkv.ir.memory.Observer.observe`."""
        features, end = self.made.features, self.past + hidden.shape[1]
        made = features.get(site)
        features[site] = self._with_room(made, (hidden.shape[2],), hidden.dtype, end, dim=0)
        features[site][self.past : end] = hidden[0].cpu()

    def read_states(self, site: int) -> list[Tensor] | None:
        """The states of a recurrent site after the chunks so far; see `semkv.ir.memory.States.read_states`."""
        return self.made.recurrent.get(site)

    def take_choice(self, site: int, places: Tensor) -> None:
        """See `semkv.ir.memory.States.take_choice`: all tokens are there."""

    def write_states(self, site: int, states: Sequence[Tensor]) -> None:
        """Take its states after this chunk; see `semkv.ir.memory.States.write_states`."""
        self.made.recurrent[site] = list(states)

    def turned_rows(self) -> list[int]:
        """See `semkv.runtime.prompt.content.Contents`."""
        return [self.made.turned]

    def advance(self, tokens: int) -> None:
        """The next chunk follows one of `tokens` tokens."""
        self.past += tokens
        (self.made.turned,) = self.turned_behind([self.past], tokens)

    def finish(self) -> None:
        """The record is complete: what waits in another dtype than the record's, or with room behind it, is copied, a store at a time."""
        self.copies.finish()
        for held in (self.keys, self.values):
            for store, x in held.items():
                held[store] = self._settled(x, self.dtype, 1)
        if self.made.all_queries:
            self.made.queries.update({site: self._settled(q, q.dtype, 1) for site, q in self.made.queries.items()})
        self.made.features.update({site: self._settled(x, x.dtype, 0) for site, x in self.made.features.items()})

    def _settled(self, x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
        """x with the tokens so far along `dim`, in `dtype`; itself where that is what it is."""
        if x.shape[dim] == self.past and x.dtype == dtype:
            return x
        x = x.narrow(dim, 0, self.past)
        return self.tier.empty(tuple(x.shape), dtype).copy_(x)

    def _with_room(
        self, x: Tensor | None, sizes: tuple[int, ...], dtype: torch.dtype, end: int, *, dim: int, pinned: bool = False
    ) -> Tensor:
        """x, or a longer copy, with room up to token `end` along `dim`; sizes: of the other dimensions. A new one where there is none."""
        if x is not None and x.shape[dim] >= end:
            return x
        room = end if x is None else max(end, 2 * x.shape[dim])
        room = room if self.tokens is None else max(end, self.tokens)
        made = self.tier.empty((*sizes[:dim], room, *sizes[dim:]), dtype, pinned=pinned)
        if x is not None:
            self.copies.finish()  # what is on its way into the old one
            made.narrow(dim, 0, self.past).copy_(x.narrow(dim, 0, self.past))
        return made

    def _keep(self, held: dict[int, Tensor], name: int, x: Tensor) -> None:
        """Put x [H, t, D] behind what the chunks before left."""
        made, end = held.get(name), self.past + x.shape[1]
        whole = made is None and end == self.tokens
        dtype = made.dtype if made is not None else self.dtype if whole else x.dtype
        sizes = (x.shape[0], x.shape[2])
        held[name] = self._with_room(made, sizes, dtype, end, dim=1, pinned=self.copies.pinned)
        self.copies.to_host(held[name][:, self.past : end], x)

    def _keep_queries(self, site: int, q: Tensor) -> None:
        """All queries q [Hq, t, D], or the last ones of the chunks so far."""
        queries = self.made.queries
        if self.made.all_queries:
            made, end = queries.get(site), self.past + q.shape[1]
            queries[site] = self._with_room(made, (q.shape[0], q.shape[2]), q.dtype, end, dim=1)
            queries[site][:, self.past : end] = q.cpu()
            return
        last = q[:, -OBSERVED_QUERIES:]
        queries[site] = torch.cat([queries[site], last], 1)[:, -OBSERVED_QUERIES:] if site in queries else last.clone()

    def _so_far(self, held: Tensor, new: Tensor, first: int, end: int) -> Tensor:
        """Tokens first..end of one store, where `new` [H, t, D], the last of them, is."""
        if self.device.type == "cpu":
            return held[:, first:end]
        out = new.new_empty((new.shape[0], end - first, new.shape[2]))
        self.copies.to_device(out[:, : self.past - first], held[:, first : self.past])
        out[:, self.past - first :] = new
        return out
