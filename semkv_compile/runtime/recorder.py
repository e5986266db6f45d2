"""The memory of a prompt that is being read, in one chunk or several: what fills a `RowRecord`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.ir.memory import Entries
from semkv.ir.program import Program
from semkv.runtime.device_copies import DeviceCopies
from semkv.runtime.host_tier import HostTier
from semkv.runtime.record import OBSERVED_QUERIES, RowRecord


class Recorder:
    """Keeps what a prompt's chunks leave in the host tier, and gives later chunks the exact keys and values of earlier ones.

    The first chunk runs through the prefill program, which attends to its own tokens, later ones through the extend program.
    What several chunks attend to is held in the dtype in which it was computed and converted at the end (`finish`), so that the
    record does not depend on the chunks but for the order of sums. On a CPU attention reads the tier in place; on a device one
    layer's earlier tokens are copied there at a time, and those of the chunk go to the host while the next layer runs.
    """

    def __init__(
        self, program: Program, record: RowRecord, dtype: torch.dtype, tier: HostTier, device: torch.device
    ) -> None:
        self.made = record
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
        return Entries(
            [keys[None]],
            [values[None]],
            [torch.arange(first, end, dtype=torch.int64, device=positions.device)[None, None]],
        )

    def observe(self, site: int, hidden: Tensor) -> None:
        """Keep the hidden states of row 0; see `semkv.ir.memory.Observer.observe`."""
        features = self.made.features
        if site not in features:
            features[site] = self.tier.empty((self.made.tokens, hidden.shape[2]), hidden.dtype)
        features[site][self.past : self.past + hidden.shape[1]] = hidden[0].cpu()

    def read_states(self, site: int) -> list[Tensor] | None:
        """The states of a recurrent site after the chunks so far; see `semkv.ir.memory.States.read_states`."""
        return self.made.recurrent.get(site)

    def write_states(self, site: int, states: Sequence[Tensor]) -> None:
        """Take its states after this chunk; see `semkv.ir.memory.States.write_states`."""
        self.made.recurrent[site] = list(states)

    def advance(self, tokens: int) -> None:
        """The next chunk follows one of `tokens` tokens."""
        self.past += tokens

    def finish(self) -> None:
        """The record is complete: what waits in another dtype than the record's is converted, a store at a time."""
        self.copies.finish()
        for held in (self.keys, self.values):
            for store, x in held.items():
                if x.dtype != self.dtype:
                    held[store] = self.tier.empty(tuple(x.shape), self.dtype).copy_(x)

    def _keep(self, held: dict[int, Tensor], name: int, x: Tensor) -> None:
        """Put x [H, t, D] behind what the chunks before left."""
        if name not in held:
            whole = x.shape[1] == self.made.tokens
            shape = (x.shape[0], self.made.tokens, x.shape[2])
            held[name] = self.tier.empty(shape, self.dtype if whole else x.dtype, pinned=self.copies.pinned)
        self.copies.to_host(held[name][:, self.past : self.past + x.shape[1]], x)

    def _keep_queries(self, site: int, q: Tensor) -> None:
        """All queries q [Hq, t, D], or the last ones of the chunks so far."""
        queries = self.made.queries
        if self.made.all_queries:
            if site not in queries:
                queries[site] = self.tier.empty((q.shape[0], self.made.tokens, q.shape[2]), q.dtype)
            queries[site][:, self.past : self.past + q.shape[1]] = q.cpu()
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
