"""How a row's tokens were divided into what stays exact and what is folded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.places import ranges
from semkv.runtime.text import Text


@dataclass(frozen=True)
class Boundary:
    """From which surprisal on a token bounds a span: `nats`, and the same as `alpha` standard deviations above the text's mean."""

    nats: float
    alpha: float

    @classmethod
    def at(cls, surprisal: Tensor, alpha: float) -> Boundary:
        """Above mean + alpha * std of surprisal float32 [n] (SeKV Sec. 3.1)."""
        level = surprisal.mean() + alpha * surprisal.std(unbiased=False)
        return cls(float(torch.nextafter(level, torch.full_like(level, math.inf))), alpha)

    @classmethod
    def of(cls, surprisal: Tensor, nats: float) -> Boundary:
        """From `nats` on, in a text of surprisal float32 [n]."""
        spread = float(surprisal.std(unbiased=False))
        return cls(nats, (nats - float(surprisal.mean())) / spread if spread > 0 else math.inf)


@dataclass(frozen=True, eq=False)
class Segmentation:
    """A division of tokens 0..n-1 of one row: what stays exact, what is folded, and in which units.

    Attributes
    ----------
    kept: int64 [a], ascending: tokens that stay exact wherever they are (sinks, anchors, short spans).
    starts, lengths: int64 [s]: segments [start, start + length), ascending, disjoint, none holding a kept token.
    recent: the first token of the recent window; tokens from there on stay exact.
    units: int64 [Hkv|1, s], the unit of each segment, numbered 0, 1, ... without gaps in every head; None: each segment is
        its own unit. Units are summarised, routed to and unfolded whole.
    boundary: where surprisal decided, from where on.

    A token that is in none of the three is dropped.
    """

    kept: Tensor
    starts: Tensor
    lengths: Tensor
    recent: int
    units: Tensor | None = None
    boundary: Boundary | None = None

    @classmethod
    def of_lengths(cls, lengths: Tensor, units: Tensor | None = None) -> Segmentation:
        """All tokens folded, in neighbouring segments of the given lengths int64 [s]."""
        starts = lengths.cumsum(0) - lengths
        return cls(torch.empty(0, dtype=torch.int64, device="cpu"), starts, lengths, int(lengths.sum()), units)

    @property
    def folded(self) -> Tensor:
        """int64 [sum of lengths]: the tokens of all segments, in order."""
        return ranges(self.starts, self.lengths)

    def blocks(self, tokens: int) -> Iterator[Segmentation]:
        """The segments in runs of about `tokens` tokens, of whole units that are numbered from 0 in each run; one run where units do
        not follow each other, in all heads alike."""
        if not len(self.starts):
            return
        begins = torch.ones(len(self.starts), dtype=torch.bool, device="cpu")  # no earlier unit goes on from there
        if self.units is not None:
            highest, lowest = self.units.cummax(1).values, self.units.flip(1).cummin(1).values.flip(1)
            begins[1:] = ((highest[:, :-1] < lowest[:, 1:]) & (highest[:, :-1] == highest[:1, :-1])).all(0)
        at = torch.nonzero(begins)[:, 0]
        block = (self.lengths.cumsum(0) - self.lengths)[at] // tokens
        edges = at[torch.diff(block, prepend=block.new_full((1,), -1)) > 0].tolist()
        for first, last in zip(edges, [*edges[1:], len(self.starts)]):
            units = None if self.units is None else self.units[:, first:last] - lowest[0, first]
            yield replace(self, starts=self.starts[first:last], lengths=self.lengths[first:last], units=units)


@dataclass(frozen=True, eq=False)
class Cut:
    """Tokens that are folded, without their keys and values: what layers that fold the same tokens to the same units share.

    positions int64 [n]; surprisal float32 [n] in nats; lengths int64 [s] of their segments, in order; units int64 [Hkv|1, s], None where
    each segment is a unit; ids int64 [n] where they are known. All on one device; two cuts are the same if they are one object.
    _there: the same on another device, by its name.
    """

    positions: Tensor
    surprisal: Tensor
    lengths: Tensor
    units: Tensor | None = None
    ids: Tensor | None = None
    _there: dict[str, Cut] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, parts: Segmentation, positions: Tensor, newest: int, text: Text) -> Cut:
        """What `parts` fold of the first of the newest `newest` tokens of `text`, which are at `positions` [1, n]: the same for all layers
        that have the same parts."""

        def made() -> Cut:
            ids, surprisal = text.newest(newest, positions.shape[1])
            at = parts.folded
            return cls(positions[0, at].long(), surprisal[at], parts.lengths, parts.units, ids[at])

        return text.found.of(parts, made)

    def on(self, device: torch.device) -> Cut:
        """The same on `device`, copied there once; itself where it is there."""
        if self.positions.device == device:
            return self
        if str(device) not in self._there:
            positions, surprisal, lengths = (x.to(device) for x in (self.positions, self.surprisal, self.lengths))
            units, ids = (None if x is None else x.to(device) for x in (self.units, self.ids))
            self._there[str(device)] = Cut(positions, surprisal, lengths, units, ids)
        return self._there[str(device)]

    @cached_property
    def count(self) -> int:
        """Units."""
        return len(self.lengths) if self.units is None else int(self.units.max()) + 1

    @cached_property
    def starts(self) -> Tensor:
        """int64 [s]: the first token of each segment."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def numbers(self) -> Tensor:
        """int64 [Hkv|1, s]: the unit of each segment."""
        if self.units is None:
            return torch.arange(len(self.lengths), dtype=torch.int64, device=self.lengths.device)[None]
        return self.units

    @cached_property
    def token_unit(self) -> Tensor:
        """int64 [Hkv|1, n]: the unit of each token."""
        return self.numbers.repeat_interleave(self.lengths, dim=1)

    @cached_property
    def sizes(self) -> Tensor:
        """int64 [Hkv|1, m]: tokens of each unit."""
        unit = self.token_unit
        return unit.new_zeros(unit.shape[0], self.count).scatter_add_(1, unit, torch.ones_like(unit))

    @cached_property
    def mean_positions(self) -> Tensor:
        """int32 [Hkv|1, m]: where each unit is."""
        where = self.positions.float()[None, :, None].expand(len(self.token_unit), -1, -1)
        return self.mean(where)[..., 0].to(torch.int32)

    def mean(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Means over units: x [H, n, d] of the tokens, weights [H|1, n] that sum to 1 in each unit (uniform without)
        -> float32 [H, m, d]; H a multiple of Hkv."""
        if weights is None:
            weights = self._uniform
        return self._reduce(x.float() * self._rows(weights, x.shape[0])[..., None], "sum")

    def smallest(self, x: Tensor) -> Tensor:
        """Minimum over units, [H, n, d] -> [H, m, d]."""
        return self._reduce(x, "min")

    def largest(self, x: Tensor) -> Tensor:
        """Maximum over units, [H, n, d] -> [H, m, d]."""
        return self._reduce(x, "max")

    @cached_property
    def surprisal_mass(self) -> Tensor:
        """float32 [Hkv|1, m]: the surprisal of each unit's tokens together."""
        unit = self.token_unit
        return self.surprisal.new_zeros(unit.shape[0], self.count).scatter_add_(
            1, unit, self.surprisal.expand(unit.shape[0], -1)
        )

    @cached_property
    def surprisal_weights(self) -> Tensor:
        """SeKV Eq. 2: each token's share of its unit's surprisal, uniform where a unit's surprisal is zero, [Hkv|1, n]."""
        unit = self.token_unit
        surprisal = self.surprisal.expand(unit.shape[0], -1)
        total = self.surprisal_mass.gather(1, unit)
        return torch.where(total > 0, surprisal / total.clamp(min=1e-20), self._uniform)

    @cached_property
    def _uniform(self) -> Tensor:
        return 1.0 / self.sizes.gather(1, self.token_unit).float()

    def _reduce(self, x: Tensor, how: str) -> Tensor:
        """x [H, n, d] over units."""
        if self.units is None:
            return over_runs(x, self.lengths, how)
        how = how if how == "sum" else f"a{how}"
        unit = self._rows(self.token_unit, x.shape[0])[..., None].expand_as(x)
        out = x.new_zeros(x.shape[0], self.count, x.shape[2])
        return out.scatter_reduce_(1, unit, x, how, include_self=how == "sum")

    @staticmethod
    def _rows(x: Tensor, heads: int) -> Tensor:
        """x [Hkv|1, n] -> [heads, n]: query heads of a group share a row."""
        if x.shape[0] in (1, heads):
            return x.expand(heads, -1)
        return x.repeat_interleave(heads // x.shape[0], 0)


def over_runs(x: Tensor, lengths: Tensor, how: str) -> Tensor:
    """`sum`, `min` or `max` of x [H, n, d] over neighbouring runs of tokens of lengths int64 [m], on the device of x: [H, m, d]. In their
    order, so that each device gives the same bits each time."""
    each = lengths.to(x.device).expand(x.shape[0], -1).contiguous()
    return torch.segment_reduce(x.contiguous(), how, lengths=each, axis=1, unsafe=True)


@dataclass(frozen=True)
class Folding:
    """Tokens of a layer as they are folded, for what is kept of them: k [Hkv, n, D], v [Hkv, n, Dv], where what is kept is computed.
    shared: how they are cut, on the host. record: of the prompt that they are part of, None for tokens that left the window in
    generation."""

    k: Tensor
    v: Tensor
    shared: Cut
    record: RowRecord | None = None

    @property
    def cut(self) -> Cut:
        """How they are cut, where keys and values are."""
        return self.shared.on(self.k.device)
