"""What components are shown of a row's memory: the folded units of a part of a store, and its exact tokens."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.host.pool import HostTokens
from semkv.runtime.store.device_index import DeviceIndex, IndexedUnits
from semkv.runtime.store.places import Places
from semkv.runtime.store.quantization import Quantized
from semkv.runtime.store.roomy import Roomy
from semkv.runtime.store.tables import Tables


class UnitsView(IndexedUnits, Protocol):
    """M folded units of H KV heads, see `semkv.runtime.store.spans.FoldedSpans`.

    device: where their tokens wait, None for the host. known: what a component keeps until the units change; it holds what tells that.
    tables: which units there are, and of which stored runs of tokens.
    """

    device: torch.device | None
    known: Any
    room: Roomy
    host_tokens: HostTokens
    tables: Tables

    @property
    def count(self) -> int:
        """M."""

    @property
    def run_from(self) -> int | None:
        """The position of the first unit, where all have one token each and follow one another; else None."""

    @property
    def places(self) -> Places:
        """Where their tokens wait."""

    @property
    def mean_directions(self) -> Quantized | Tensor:
        """The mean keys at length 1, [Hkv, M, D]."""

    @property
    def unit_nbytes_range(self) -> tuple[int, int]:
        """Device bytes of the smallest and the largest unit when it is unfolded, per KV head."""

    def on(self, device: torch.device) -> DeviceIndex:
        """What the device keeps of them, on `device`."""

    def indexed(self, name: str) -> Tensor:
        """One tensor of the router's index, float32 [rows, M, dim]."""

    def products(self, q: Tensor, name: str) -> Tensor:
        """q [Hkv, R, D] times a tensor of the index, see `semkv.runtime.store.spans.FoldedSpans.products`."""

    def step_tensors(self) -> dict[str, Tensor]:
        """What a step's graph reads of them, by name."""

    def waiting_places(self) -> tuple[Tensor, Tensor]:
        """(places, positions) of all tokens that wait."""


class TokensView(Protocol):
    """Exact tokens on the device."""

    @property
    def positions(self) -> Tensor:
        """int32 [Hkv|1, n]."""

    @property
    def k(self) -> Tensor | Quantized:
        """Keys [Hkv, n, D]."""


class PartView(Protocol):
    """The memory of a part of a store, see `semkv.runtime.store.site_memory.SiteMemory`."""

    @property
    def site(self) -> AttentionSite: ...

    @property
    def kept(self) -> TokensView: ...

    @property
    def recent(self) -> TokensView: ...

    @property
    def spans(self) -> UnitsView | None: ...


__all__ = ["PartView", "TokensView", "UnitsView"]
