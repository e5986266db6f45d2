"""Spans that are read as low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.runtime.host.pool import HostFactors


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


@dataclass
class FactorsRead:
    """What the last step has read as factors, of `nbytes` bytes. there: on the device, where the step was no graph. A graph reads factors
    where they wait, and `held` has, by the name that it knows it by, bool [Hkv, n]: which spans it has read, by their number."""

    there: UnfoldedFactors | None = None
    held: Mapping[str, Tensor] = field(default_factory=dict)
    nbytes: int = 0

    def hold(self, heads: int, spans: int) -> None:
        """Have places for so many spans, of which those are kept that are there."""
        held = self.held.get("held")
        if held is None:
            held = torch.zeros(heads, 0, dtype=torch.bool, device="cpu")
        if held.shape[1] < spans:
            self.there, self.held = None, {"held": pad(held, (0, spans - held.shape[1]))}

    def clone(self) -> FactorsRead:
        return FactorsRead(self.there, {name: x.clone() for name, x in self.held.items()}, self.nbytes)


def gather_factors(
    host: HostFactors, ids: Tensor, resident: UnfoldedFactors | None
) -> tuple[dict[str, Tensor], int, int]:
    """Factors `ids` int64 [Hkv, F] (-1 pads), and the bytes that came from the host and that were there."""
    held = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
    if resident is not None:
        match = (ids[:, :, None] == resident.ids[:, None, :]) & (ids >= 0)[:, :, None]
        held, at = match.any(-1), match.int().argmax(-1)
    out = host.gather(ids, skip=held)
    heads, columns = torch.nonzero(held, as_tuple=True)
    if len(heads):
        source = at[heads, columns]
        for kind, new in out.items():
            old = resident.parts[kind][heads, source].to(new.device)
            fits = tuple(slice(min(a, b)) for a, b in zip(old.shape[1:], new.shape[2:]))
            part = new[heads, columns]
            part[(slice(None), *fits)] = old[(slice(None), *fits)]
            new[heads, columns] = part
    moved, stayed = (
        int(host.span_nbytes()[heads, ids[heads, columns]].sum())
        for heads, columns in (torch.nonzero(part, as_tuple=True) for part in ((ids >= 0) & ~held, held))
    )
    return out, moved, stayed


__all__ = ["FactorsRead", "UnfoldedFactors", "gather_factors"]
