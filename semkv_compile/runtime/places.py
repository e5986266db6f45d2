"""Where the tokens of folded units wait, as `semkv::unfold_` reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.kernels.slots import Segments


@dataclass(frozen=True)
class Places:
    """Unit u's tokens wait at `start` + u * `length` and so on, where all have `length`; else at bounds[u] to bounds[u + 1] - 1 (int32
    [Hkv|1, M + 1]), or at these places of `order` (int32 [Hkv|1, n]) where there is one. The token at place p has position p + `shift`, or
    where[0, p] (int32 [1, N])."""

    length: int
    start: int
    shift: int
    bounds: Tensor | None = None
    order: Tensor | None = None
    where: Tensor | None = None


def places_of(segments: Segments, unit: Tensor, units: int, waiting: int, retired: Tensor) -> Places:
    """Of `units` units, of which `segments` have their tokens: unit int64 [Hkv|1, S] says whose each segment is, -1 nobody's.

    waiting: tokens N that wait in all; retired: position, length and place int64 [R, 3] of segments that have no unit any more.
    """
    even = segments.even
    plain = unit.shape == (1, units) and torch.equal(unit[0], torch.arange(units, dtype=torch.int64, device="cpu"))
    if even is not None and plain:
        return Places(even.length, even.start, even.position - even.start)
    shift, where = _positions(segments, waiting, retired)
    ends = segments.start + segments.length
    follows = len(unit) == 1 and bool((unit[0, 1:] >= unit[0, :-1]).all()) and torch.equal(ends[:-1], segments.start[1:])
    if follows and units and int(unit[0, 0]) == 0:
        sizes = segments.length.new_zeros(units + 1).scatter_add_(0, unit[0] + 1, segments.length)
        sizes[0] = segments.start[0]
        return Places(0, 0, shift, sizes.cumsum(0).to(torch.int32)[None], None, where)
    token = _ranges(segments.start, segments.length)
    of_token = unit.repeat_interleave(segments.length, dim=1)
    order = of_token.argsort(dim=1, stable=True)
    sizes = of_token.new_zeros(len(unit), units + 1).scatter_add_(1, of_token + 1, torch.ones_like(of_token))
    return Places(0, 0, shift, sizes.cumsum(1).to(torch.int32), token[order].to(torch.int32), where)


def _positions(segments: Segments, waiting: int, retired: Tensor) -> tuple[int, Tensor | None]:
    """(what the position of each token is above its place, None), or (0, int32 [1, N] the position at each place) where that differs."""
    shifts = segments.position - segments.start
    if not len(shifts):
        return 0, None
    if bool((shifts == shifts[0]).all()):
        return int(shifts[0]), None
    where = torch.zeros(waiting, dtype=torch.int32, device="cpu")
    position, length, start = (
        torch.cat([old, new]) for old, new in zip(retired.unbind(1), (segments.position, segments.length, segments.start))
    )
    where[_ranges(start, length)] = _ranges(position, length).to(torch.int32)
    return 0, where[None]


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The places [start, start + length) of every range, one after the other, int64."""
    ends = lengths.cumsum(0)
    shift = (starts - ends + lengths).repeat_interleave(lengths)
    return shift + torch.arange(len(shift), dtype=torch.int64, device="cpu")


__all__ = ["Places", "places_of"]
