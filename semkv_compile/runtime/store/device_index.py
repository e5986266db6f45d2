"""What routing and coarse entries read of folded units, on the device where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.store.quantization import Quantized


class IndexedUnits(Protocol):
    """What is kept on the device of M folded units: lengths and mean positions int32 [Hkv|1, M], means [Hkv, M, D], and a router's index by
    name; replaced, never written, when the units change."""

    mean_k: Quantized | Tensor | None
    mean_v: Quantized | Tensor | None
    index: dict[str, Quantized | Tensor]

    @property
    def lengths(self) -> Tensor: ...

    @property
    def positions(self) -> Tensor: ...

    def unit_nbytes(self) -> Tensor:
        """int64 [Hkv, M]: device bytes of each unit when it is unfolded, per KV head."""


def log_sizes(lengths: Tensor, site: AttentionSite) -> Tensor:
    """float32 [Hq|1, 1, M]: log of the tokens of units, lengths [Hkv|1, M], for each query head where KV heads have their own."""
    sizes = lengths.float().log()
    return (sizes if sizes.shape[0] == 1 else sizes.repeat_interleave(site.group_size, 0))[:, None]


class DeviceIndex:
    """Copies of a `FoldedSpans`'s device tensors on `device`, each made when it is first asked for; the tensors themselves where they
    are there already. Good until the units change, which replaces `lengths`.

    constants: what does not change with the units (a router's weights, say), by name; handed on to the next one. It holds tensors of
    the spans, not the spans, which hold it: what waits on the host goes with them at once.
    """

    def __init__(self, spans: IndexedUnits, device: torch.device, constants: dict[str, Tensor]) -> None:
        self.device, self.constants = device, constants
        self._units, self._positions = spans.lengths, spans.positions
        self._mean_k, self._mean_v, self._index = spans.mean_k, spans.mean_v, dict(spans.index)
        self._copies: dict[str, Tensor] = {}

    def serves(self, spans: IndexedUnits, device: torch.device) -> bool:
        """Whether it is still what `spans` have."""
        return self._units is spans.lengths and self.device == device

    @property
    def lengths(self) -> Tensor:
        """int32 [Hkv|1, M], tokens of each unit."""
        return self._tensor("lengths", lambda: self._units)

    @property
    def positions(self) -> Tensor:
        """int32 [Hkv|1, M], mean position of each unit."""
        return self._tensor("positions", lambda: self._positions)

    def log_sizes(self, site: AttentionSite) -> Tensor:
        """See `log_sizes`."""
        return self._tensor(f"log_sizes.{site.group_size}", lambda: log_sizes(self._units, site))

    @property
    def mean_k(self) -> Quantized | Tensor:
        return self._numbers("mean_k", self._mean_k)

    @property
    def mean_v(self) -> Quantized | Tensor:
        return self._numbers("mean_v", self._mean_v)

    def costs(self, spans: IndexedUnits) -> Tensor:
        """int32 [Hkv, M]: bytes of each unit when it is unfolded, per KV head."""
        return self._tensor("costs", lambda: spans.unit_nbytes().to(torch.int32))

    def indexed(self, name: str) -> Tensor:
        """One tensor of the router's index that is not quantised."""
        held = self._index[name]
        if isinstance(held, Quantized):
            raise ValueError(f"index {name!r} is quantised; expected plain numbers")
        return self._tensor(f"index.{name}", lambda: held)

    def constant(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """`make()` on the device, made once."""
        if name not in self.constants:
            self.constants[name] = make().to(self.device)
        return self.constants[name]

    def _tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._copies:
            self._copies[name] = make().to(self.device)
        return self._copies[name]

    def _numbers(self, name: str, held: Quantized | Tensor | None) -> Quantized | Tensor:
        if held is None:
            raise ValueError("the method keeps no summaries of its units")
        if isinstance(held, Tensor):
            return self._tensor(name, lambda: held)
        codes = self._tensor(f"{name}.codes", lambda: held.codes)
        return Quantized(codes, self._tensor(f"{name}.scale", lambda: held.scale), held.bits, held.dim)
