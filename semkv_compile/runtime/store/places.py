"""Where the tokens of folded units wait, as `semkv::unfold_` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Even(NamedTuple):
    """Segment n has `length` tokens, the first of them with position `position` + n * `length` at place `start` + n * `length`."""

    length: int
    position: int
    start: int


@dataclass(frozen=True)
class Segments:
    """Stored runs of tokens: length, position of the first token and its place in the host tier, int64 [S] each."""

    length: Tensor
    position: Tensor
    start: Tensor

    @cached_property
    def even(self) -> Even | None:
        """What tells these tables without reading them, where they are as regular as pages."""
        if not len(self.length):
            return None
        found = Even(int(self.length[0]), int(self.position[0]), int(self.start[0]))
        steps = found.length * torch.arange(len(self.length), dtype=torch.int64, device="cpu")
        lengths = bool((self.length == found.length).all()) and found.length > 0
        follow = torch.equal(self.position - found.position, steps) and torch.equal(self.start - found.start, steps)
        return found if lengths and follow else None


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

    def units_of(self, places: Tensor) -> Tensor:
        """The units int64 [Hkv, s] of tokens at `places` int32 [Hkv, s], -1 for -1."""
        if self.bounds is None:
            unit = torch.div(places.long() - self.start, self.length, rounding_mode="floor")
        elif self.order is None:
            unit = torch.searchsorted(self.bounds.expand(len(places), -1).contiguous(), places, right=True) - 1
        else:
            unit = self._unit_at.expand(len(places), -1).gather(1, places.clamp(min=0).long())
        return torch.where(places >= 0, unit, -1)

    @cached_property
    def _unit_at(self) -> Tensor:
        """int64 [Hkv|1, N]: the unit of the token at each place."""
        assert self.bounds is not None
        assert self.order is not None
        place = torch.arange(self.order.shape[1], dtype=torch.int32, device="cpu").expand_as(self.order).contiguous()
        unit = torch.searchsorted(self.bounds.contiguous(), place, right=True) - 1
        return torch.full_like(unit, -1).scatter_(1, self.order.long(), unit)

    def tokens(self, chosen: Tensor) -> Tensor:
        """int64 [Hkv]: tokens of the units chosen bool [Hkv, M], of those that wait as tokens."""
        if self.bounds is None:
            return chosen.sum(1) * self.length
        return (chosen * self.bounds.diff(dim=1)).sum(1)


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
    follows = (
        len(unit) == 1 and bool((unit[0, 1:] >= unit[0, :-1]).all()) and torch.equal(ends[:-1], segments.start[1:])
    )
    if follows and unit.shape[1] and int(unit[0, 0]) >= 0:
        sizes = segments.length.new_zeros(units + 1).scatter_add_(0, unit[0] + 1, segments.length)
        sizes[0] = segments.start[0]
        return Places(0, 0, shift, sizes.cumsum(0).to(torch.int32)[None], None, where)
    token = ranges(segments.start, segments.length)
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
        torch.cat([old, new])
        for old, new in zip(retired.unbind(1), (segments.position, segments.length, segments.start))
    )
    where[ranges(start, length)] = ranges(position, length).to(torch.int32)
    return 0, where[None]


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The places [start, start + length) of every range, one after the other, int64."""
    ends = lengths.cumsum(0)
    shift = (starts - ends + lengths).repeat_interleave(lengths)
    return shift + torch.arange(len(shift), dtype=torch.int64, device="cpu")


__all__ = ["Places", "Segments", "places_of", "ranges"]
