"""Spans that are read as low-rank factors, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class UnfoldedFactors:
    """Factored spans on the device, per KV head, padded: `parts` as `HostFactors.gather`, ids int64 [Hkv, F] (-1 pads), positions
    int32 [Hkv, F, L], unit int64 [Hkv, F]. moved_nbytes: what crossed the link for it; held_nbytes: what was there."""

    parts: dict[str, Tensor]
    ids: Tensor
    positions: Tensor
    unit: Tensor
    moved_nbytes: int
    held_nbytes: int

    @property
    def tensors(self) -> list[Tensor]:
        """What is on the device."""
        return [*self.parts.values(), self.positions]

    @property
    def nbytes(self) -> int:
        """Device bytes, padding included."""
        return sum(x.nbytes for x in self.tensors)


__all__ = ["UnfoldedFactors"]
