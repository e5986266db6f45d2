"""Which units a store has folded and where their tokens wait: what does not depend on keys and values, and layers that fold alike share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.ir.state_ops import EMPTY
from semkv.runtime.store.pairs import Pairs
from semkv.runtime.store.places import Places, Segments, places_of
from semkv.runtime.store.roomy import room_for
from semkv.runtime.store.segments import Cut
from semkv.runtime.text import Once, once

TOKENS, FACTORS = 0, 1


@dataclass(frozen=True, eq=False)
class Tables:
    """M units of S stored segments, on the host. Never changed: each change makes others, and stores that make the same change to the same
    tables at a time (`Once`) have the same ones then, so that what follows from them is found out once for all layers of a row.

    lengths, positions: int32 [Hkv|1, M], tokens of each unit and where they are on the mean. mass: float32 [Hkv|1, M], of units whose
    means are weighted, what their tokens weigh together; else [1, 0]. segment_unit: int64 [Hkv|1, S], -1 where nothing routes to a segment
    any more. segment_kind, segment_length, segment_position, segment_start: int64 [S]; the last is the first token among those that wait,
    or the number of a factored span. retired: int64 [R, 3], position, length and start of segments that the last change has taken out of
    them. shares: of the units that the change made of two, what the first had of each by tokens and by weight, float32 [Hkv|1, P].
    """

    lengths: Tensor
    positions: Tensor
    mass: Tensor
    segment_unit: Tensor
    segment_kind: Tensor
    segment_length: Tensor
    segment_position: Tensor
    segment_start: Tensor
    retired: Tensor | None = None
    shares: tuple[Tensor, Tensor] | None = None
    _found: Once = field(default_factory=Once, init=False, repr=False)

    @classmethod
    def empty(cls) -> Tables:
        """Of no units."""
        units, mass, segments = (
            torch.zeros(1, 0, dtype=dtype, device="cpu") for dtype in (torch.int32, torch.float32, torch.int64)
        )
        return cls(units, units, mass, segments, segments[0], segments[0], segments[0], segments[0])

    # -- changes -----------------------------------------------------------------------------------------------------

    def folded(
        self, cut: Cut, heads: int, *, weighted: bool, waits_from: int | None, shared: Once | None = None
    ) -> Tables:
        """With the units of `cut` behind, whose tokens wait from `waits_from` on; None: nothing waits. weighted: whether `mass` is kept.
        shared: what other stores have made of the same tables in the same way, here and below."""

        def made() -> Tables:
            starts = None if waits_from is None else waits_from + cut.starts
            return self._folded(cut, heads, weighted, starts, None)

        return once(shared, (self, cut, heads, weighted, waits_from), made)

    def factored(self, cut: Cut, heads: int, *, weighted: bool, waits_from: Tensor, factored: Tensor) -> Tables:
        """With the units of `cut` behind, of which `factored`, bool [s], wait as factors, which a layer's own keys decide."""
        return self._folded(cut, heads, weighted, waits_from, factored)

    def _folded(
        self, cut: Cut, heads: int, weighted: bool, waits_from: Tensor | None, factored: Tensor | None
    ) -> Tables:
        changes: dict[str, Any] = {
            "lengths": _same_rows(self.lengths, cut.sizes.to(torch.int32), heads),
            "positions": _same_rows(self.positions, cut.mean_positions, heads),
        }
        if weighted:
            changes["mass"] = _same_rows(self.mass, cut.surprisal_mass, heads)
        if waits_from is not None:
            kind = torch.zeros_like(cut.lengths) if factored is None else factored.long()
            changes |= {
                "segment_unit": _same_rows(self.segment_unit, self.count + cut.numbers, heads),
                "segment_kind": torch.cat([self.segment_kind, kind]),
                "segment_length": torch.cat([self.segment_length, cut.lengths]),
                "segment_position": torch.cat([self.segment_position, cut.positions[cut.starts].long()]),
                "segment_start": torch.cat([self.segment_start, waits_from]),
            }
        return replace(self, **changes, retired=None, shares=None)

    def joined(self, lefts: tuple[int, ...], shared: Once | None = None) -> Tables:
        """With one unit for each of the units `lefts`, ascending, and the one after it."""
        return once(shared, (self, "joined", lefts), lambda: self._joined(lefts))

    def _joined(self, lefts: tuple[int, ...]) -> Tables:
        pairs = Pairs(lefts)
        first, second = pairs.of(self.lengths)
        total = first + second
        by_size = first / total
        by_mass, mass = by_size, self.mass
        if mass.numel():
            first, second = pairs.of(mass)
            both = first + second
            by_mass = torch.where(both > 0, first / both.clamp(min=1e-20), by_size)
            mass = pairs.joined(mass, both)
        number = pairs.numbers(self.count)
        return replace(
            self,
            lengths=pairs.joined(self.lengths, total),
            positions=pairs.joined(self.positions, pairs.mean(self.positions[..., None], by_size)[..., 0]),
            mass=mass,
            segment_unit=torch.where(self.segment_unit >= 0, number[self.segment_unit.clamp(min=0)], -1),
            retired=None,
            shares=(by_size, by_mass),
        )

    def without_oldest(self, units: int, shared: Once | None = None) -> Tables:
        """Without the oldest `units` units, and without the first segments that nothing routes to then, so that a step's work does not grow
        with them."""
        return once(shared, (self, "without", units), lambda: self._without_oldest(units))

    def _without_oldest(self, units: int) -> Tables:
        unit = torch.where(self.segment_unit >= units, self.segment_unit - units, -1)
        routed = (unit >= 0).any(0)
        count = int(routed.int().argmax()) if bool(routed.any()) else len(routed)
        columns: dict[str, Any] = self._columns
        tokens = self.segment_kind[:count] == TOKENS
        return replace(
            self,
            lengths=self.lengths[:, units:].clone(),
            positions=self.positions[:, units:].clone(),
            mass=self.mass[:, units:].clone(),
            segment_unit=unit[:, count:].clone(),
            segment_kind=self.segment_kind[count:].clone(),
            **{name: x[count:].clone() for name, x in columns.items()},
            retired=torch.stack([columns[name][:count][tokens] for name in RETIRED], 1),
            shares=None,
        )

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in RETIRED}

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept on the host in any case: of segments, and `mass`."""
        return sum(x.nbytes for x in (self.segment_unit, self.segment_kind, self.mass, *self._columns.values()))

    # -- what follows from them ----------------------------------------------------------------------------------------

    @cached_property
    def count(self) -> int:
        """M."""
        return self.lengths.shape[1]

    @cached_property
    def run_from(self) -> int | None:
        """Position of the first unit where each is the token after that of the unit before, for all heads; None where they are not."""
        first = int(self.positions[0, 0]) if self.count else 0
        run = torch.arange(first, first + self.count, dtype=torch.int32, device="cpu")[None]
        return first if self.count and torch.equal(self.positions, run.expand_as(self.positions)) else None

    @cached_property
    def holds_factors(self) -> bool:
        """Whether some segments wait as factors."""
        return bool((self.segment_kind == FACTORS).any())

    @cached_property
    def alone(self) -> bool:
        """Whether each segment is a unit, in order."""
        own = torch.arange(self.count, dtype=torch.int64, device="cpu")[None]
        return self.segment_unit.shape == own.shape and torch.equal(self.segment_unit, own)

    def waiting(self) -> Tensor:
        """int64 [s, 3]: position, length and start of the segments that wait as tokens."""
        kept = self.segment_kind == TOKENS
        return torch.stack([x[kept] for x in self._columns.values()], 1)

    def unit_nbytes(self, token_nbytes: int) -> Tensor:
        """int64 [Hkv|1, M]: device bytes of each unit, a token of which takes so many, where all wait as tokens."""
        return self._found.of(("nbytes", token_nbytes), lambda: self.sums(self.segment_length[None] * token_nbytes))

    def sums(self, of_segments: Tensor) -> Tensor:
        """int64 [Hkv|1, M]: sums over the segments of each unit, of_segments int64 [Hkv|1, S]."""
        rows = max(len(of_segments), len(self.segment_unit))  # one where heads do not differ
        out = torch.zeros(rows, self.count, dtype=torch.int64, device="cpu")
        if not self.count:
            return out
        unit = self.segment_unit.expand(rows, -1)
        return out.scatter_add_(1, unit.clamp(min=0), of_segments * (unit >= 0))

    def unit_nbytes_range(self, token_nbytes: int) -> tuple[int, int]:
        """The smallest and the largest of `unit_nbytes`, 0 without units."""
        return self._found.of(("range", token_nbytes), lambda: range_of(self.unit_nbytes(token_nbytes)))

    def open_tokens(self, position: int) -> int:
        """Tokens of the last unit, where the token at `position` is the one behind its last; else 0."""
        return self._found.of(("open", position), lambda: self._open_tokens(position))

    def _open_tokens(self, position: int) -> int:
        if not self.count or self.segment_unit.shape[0] > 1 or int(self.segment_unit[0, -1]) != self.count - 1:
            return 0
        follows = int(self.segment_position[-1] + self.segment_length[-1]) == position
        return int(self.lengths[0, -1]) if follows else 0

    def goes_on(self, unit: int, longest: int) -> bool:
        """Whether the first token of `unit` follows on the last of the unit before it, and both have at most `longest` tokens and wait."""
        return self._found.of(("goes on", unit, longest), lambda: self._goes_on(unit, longest))

    def _goes_on(self, unit: int, longest: int) -> bool:
        together = self.lengths[:, unit - 1 : unit + 1].sum(1)
        before, own = (torch.nonzero(self.segment_unit[0] == number)[:, 0] for number in (unit - 1, unit))
        if not len(before) or not len(own) or int(together.max()) > longest:
            return False
        end = self.segment_position[before[-1]] + self.segment_length[before[-1]]
        return torch.equal(end, self.segment_position[own[0]])

    def shortest_pairs(self, pairs: int, longest: int) -> tuple[int, ...]:
        """The first units of up to `pairs` pairs of neighbours, the shortest together first, none above `longest` tokens; ascending."""
        return self._found.of(("pairs", pairs, longest), lambda: self._shortest_pairs(pairs, longest))

    def _shortest_pairs(self, pairs: int, longest: int) -> tuple[int, ...]:
        together = (self.lengths[:, :-1] + self.lengths[:, 1:]).amax(0)
        order = torch.argsort(together, stable=True)
        taken: set[int] = set()
        lefts: list[int] = []
        for left in order[together[order] <= longest].tolist():
            if len(lefts) == pairs:
                break
            if not taken & {left, left + 1}:
                taken |= {left, left + 1}
                lefts.append(left)
        return tuple(sorted(lefts))

    def places(self, waiting: int, retired: Tensor) -> Places:
        """Where the tokens of each unit wait, of `waiting` tokens in all; retired: int64 [R, 3] of all segments that were taken out."""
        return self._found.of(("places", waiting), lambda: self._places(waiting, retired))

    def _places(self, waiting: int, retired: Tensor) -> Places:
        segments, unit = Segments(self.segment_length, self.segment_position, self.segment_start), self.segment_unit
        if self.holds_factors:
            factored = self.segment_kind == FACTORS
            segments = Segments(*(x[~factored] for x in (segments.length, segments.position, segments.start)))
            unit = unit[:, ~factored]
        return places_of(segments, unit, self.count, waiting, retired)

    def roomy(self, name: str) -> Tensor:
        """`lengths` or `positions` with room behind them, as a step's graph reads them."""
        behind = room_for(self.count) - self.count
        return self._found.of(("roomy", name), lambda: pad(getattr(self, name), (0, behind)))

    def roomy_places(self, places: Places, capacity: int) -> dict[str, Tensor]:
        """The tensors of `places`, by name, with room behind them: as many places as tokens may wait, `capacity`."""
        return self._found.of(("roomy places", capacity), lambda: self._roomy_places(places, capacity))

    def _roomy_places(self, places: Places, capacity: int) -> dict[str, Tensor]:
        out = {}
        if places.bounds is not None:
            out["places.bounds"] = pad(places.bounds, (0, room_for(self.count) - self.count), value=EMPTY)  # in order
        for name in ("order", "where"):
            x = getattr(places, name)
            if x is not None:
                out[f"places.{name}"] = pad(x, (0, capacity - x.shape[1]))
        return out


RETIRED = ("segment_position", "segment_length", "segment_start")
"""Columns of a segment that is retired."""


def range_of(costs: Tensor) -> tuple[int, int]:
    """The smallest and the largest number of costs [Hkv|1, M], 0 without any."""
    if not costs.numel():
        return 0, 0
    least, greatest = costs.aminmax()
    return int(least), int(greatest)


def _same_rows(old: Tensor, new: Tensor, heads: int) -> Tensor:
    """old, new [Hkv|1, m] one behind the other; all rows where either has its own per head."""
    if old.shape[0] != new.shape[0]:
        old, new = old.expand(heads, -1), new.expand(heads, -1)
    return torch.cat([old, new], 1)


__all__ = ["FACTORS", "TOKENS", "Tables", "range_of"]
