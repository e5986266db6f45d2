"""The simplest memory there is: all tokens of all sites, exact, in lists. What the real ones are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from semkv.ir.memory import Entries, TextInputs
from semkv.ir.site import AttentionSite


class PlainMemory(TextInputs):
    """Keeps every key and value; a sliding window is left to the operator, which masks by position.

    Parameters
    ----------
    sites: of the program; sites of one store write once.
    keep: of each site's keys, the positions to keep, as a function of positions [B, T] -> bool [T]; None keeps all.
        A control that drops tokens shows that a comparison can fail at all.
    """

    def __init__(self, sites: Iterable[AttentionSite], keep=None) -> None:
        self.store_of = {site.index: site.store for site in sites}
        self.keep = keep
        self.tensors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.recurrent: dict[int, Sequence[Tensor]] = {}
        self._writer: dict[int, int] = {}

    def record(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Prefill: keep the tokens of an empty memory; see `semkv.ir.memory.Memory.record`."""
        self._store(site, k, v, positions)

    def entries(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Entries:
        """Append the new tokens and return all; see `semkv.ir.memory.Memory.entries`."""
        self._store(site, k, v, positions)
        keys, values, places = self.tensors[self.store_of[site]]
        return Entries([keys], [values], [places[:, None, :]])

    def read_states(self, site: int) -> Sequence[Tensor] | None:
        """See `semkv.ir.memory.States.read_states`."""
        return self.recurrent.get(site)

    def take_choice(self, site: int, places: Tensor) -> None:
        """See `semkv.ir.memory.States.take_choice`: all tokens are there."""

    def write_states(self, site: int, states: Sequence[Tensor]) -> None:
        """See `semkv.ir.memory.States.write_states`."""
        self.recurrent[site] = states

    def _store(self, site: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        store = self.store_of[site]
        if self._writer.setdefault(store, site) != site:
            return
        if self.keep is not None and positions.shape[1] > 1:
            index = self.keep(positions).nonzero()[:, 0]
            k, v, positions = k[:, :, index], v[:, :, index], positions[:, index]
        if store in self.tensors:
            old_k, old_v, old_positions = self.tensors[store]
            k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
            positions = torch.cat((old_positions, positions), 1)
        self.tensors[store] = (k, v, positions)
