"""What is folded in one KV store of one row: summaries and indexes on the device, tokens or factors on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.ir.state_ops import EMPTY
from semkv.runtime.budgets.costs import exact_nbytes
from semkv.runtime.components import Components, IndexPart
from semkv.runtime.host.pool import GrowingTensor, HostFactors, HostTokens, RoomKinds, room_kinds
from semkv.runtime.host.tier import HostTier
from semkv.runtime.store.device_index import DeviceIndex
from semkv.runtime.store.factors import UnfoldedFactors, gather_factors
from semkv.runtime.store.pairs import Pairs
from semkv.runtime.store.places import Places, Segments, places_of, ranges
from semkv.runtime.store.quantization import (
    Quantized,
    dequantize,
    held,
    norms,
    products,
    quantize,
    tensors_of,
)
from semkv.runtime.store.roomy import Roomy, room_for
from semkv.runtime.store.segments import Folding

TOKENS, FACTORS = 0, 1


class FoldedSpans:
    """Folded units in the order in which they were made. A unit is routed to and unfolded whole. It is one or more stored
    segments, each raw tokens or factors: spans merge as the sequence grows, and some units are not runs of tokens. Heads
    share their units or have their own (`segment_unit` [1, S] or [Hkv, S], -1 where nothing routes to a segment any more).

    Device: where the method has a summary, mean keys and values [Hkv, M], quantised or in the KV dtype, lengths and mean positions
    int32 [Hkv|1, M]; the router's index, by name, [rows, M, ...]. Host: tokens, factors and tables; mass float32 [Hkv|1, M], of units whose
    means are weighted, what their tokens weigh together. Segments that nothing routes to any
    more, before all others, are in no table but `retired`: position, length and place int64 [1, R, 3] of those that are tokens.
    """

    def __init__(
        self,
        site: AttentionSite,
        components: Components,
        dtype: torch.dtype,
        *,
        tier: HostTier | None = None,
        device: torch.device | None = None,
    ) -> None:
        """device: where folded tokens and factors wait; None: on the host, in `tier`."""
        self.site, self.components, self.dtype, self.device = site, components, dtype, device
        heads = site.kv_heads
        form = "raw" if components.host_form == "none" else components.host_form  # then it stays empty
        dims = (heads, site.key_dim, site.value_dim, dtype)
        self.host_tokens = HostTokens(*dims, form, tier=tier, device=device)
        self.host_factors = HostFactors(*dims, tier=tier, device=device)
        self.segment_unit = torch.zeros(1, 0, dtype=torch.int64, device="cpu")
        self.segment_kind = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.segment_length = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.segment_position = torch.zeros(0, dtype=torch.int64, device="cpu")
        self.segment_start = torch.zeros(
            0, dtype=torch.int64, device="cpu"
        )  # first token in HostTokens, or the factored span's number
        self.retired = GrowingTensor(1, (3,), torch.int64)
        self.lengths = torch.zeros(1, 0, dtype=torch.int32, device="cpu")
        self.positions = torch.zeros(1, 0, dtype=torch.int32, device="cpu")
        self.mass = torch.zeros(1, 0, dtype=torch.float32, device="cpu")
        self.mean_k: Quantized | Tensor | None = None
        self.mean_v: Quantized | Tensor | None = None
        self.index: dict[str, Quantized | Tensor] = {}
        self._token_nbytes = exact_nbytes(site, components, dtype) + 8
        self._costs: tuple[Tensor, Tensor] | None = None
        self._range: tuple[Tensor, tuple[int, int]] | None = None
        self._held: tuple[Tensor, int] | None = None
        self._directions: tuple[Tensor, Quantized | Tensor] | None = None
        self._plain: tuple[Tensor, bool] | None = None
        self._segments: Segments | None = None
        self._run: tuple[Tensor, int | None] | None = None
        self._there: DeviceIndex | None = None
        self._places: tuple[Tensor, Places] | None = None
        self._step: tuple[tuple[object, ...], dict[str, Tensor]] | None = None
        self.room = Roomy()
        self.known: tuple[tuple[object, ...], Tensor] | None = None
        """What a router has computed of the units, and of what."""

    @property
    def index_parts(self) -> Mapping[str, IndexPart]:
        """What the router keeps per unit."""
        components = self.components
        if components.router is None or not components.unfold:
            return {}
        return components.router.index(self.site, components.summary)

    def indexed(self, name: str) -> Tensor:
        """One tensor of the index in float32, [rows, M, dim]."""
        return dequantize(self.index[name])

    def on(self, device: torch.device) -> DeviceIndex:
        """What the device keeps of the units, on `device`; copied at most once for each change of the units."""
        if self._there is None or not self._there.serves(self, device):
            known = {} if self._there is None or self._there.device != device else self._there.constants
            self._there = DeviceIndex(self, device, known)
        return self._there

    @property
    def mean_directions(self) -> Quantized | Tensor:
        """The mean keys at length 1, zeros as they are, on the host, made once for each change of the units: of quantised ones their
        codes, with scales float32 [Hkv, M, 1], else float32 [Hkv, M, D]."""
        mean = self.mean_k
        assert mean is not None
        if self._directions is None or self._directions[0] is not self.lengths:  # replaced whenever units change
            length = norms(mean).clamp(min=1e-12)[..., None]
            made: Quantized | Tensor
            if isinstance(mean, Quantized):
                made = Quantized(mean.codes, mean.scale.float() / length, mean.bits, mean.dim)
            else:
                made = mean.float() / length
            self._directions = (self.lengths, made)
        return self._directions[1]

    def products(self, q: Tensor, name: str) -> Tensor:
        """float32 q [H, R, dim] times one tensor of the index: [H, R, M]."""
        return products(q, self.index[name])

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Units that can be routed to."""
        return self.lengths.shape[1]

    @property
    def run_from(self) -> int | None:
        """Position of the first unit where each is the token after that of the unit before, for all heads; None where they are not."""
        if self._run is None or self._run[0] is not self.positions:  # replaced whenever units change
            first = int(self.positions[0, 0]) if self.count else 0
            run = torch.arange(first, first + self.count, dtype=torch.int32, device="cpu")[None]
            self._run = (
                self.positions,
                first if self.count and torch.equal(self.positions, run.expand_as(self.positions)) else None,
            )
        return self._run[1]

    def device_tensors(self) -> list[Tensor]:
        parts: list[Quantized | Tensor | None] = [self.mean_k, self.mean_v, *self.index.values()]
        if self.components.summary is not None:
            parts += [self.lengths, self.positions]
        return [x for part in parts if part is not None for x in tensors_of(part)]

    @property
    def device_nbytes(self) -> int:
        """Bytes of `device_tensors`, with the room behind them that a step's graph reads them with."""
        if self._held is None or self._held[0] is not self.lengths:  # replaced whenever units change
            columns = room_for(self.count)
            held: float = sum(x.nbytes // x.shape[1] * columns for x in self.device_tensors() if x.shape[1])
            if (
                self.site.once != 1
                and self.components.summary is not None
                and not getattr(self.components.segmenter, "per_head", False)
            ):
                held -= 8 * columns * (1 - self.site.once)  # lengths and positions are the same in all heads
            self._held = (self.lengths, held)  # type: ignore[assignment]
        return self._held[1]

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of the tokens and factors that wait to be unfolded, wherever they are."""
        return sum(part.nbytes for part in self._waiting())

    @property
    def disk_nbytes(self) -> int:
        """Those of them that are in files."""
        return sum(part.disk_nbytes for part in self._waiting())

    @property
    def reserved_nbytes(self) -> int:
        """Bytes allocated ahead for what waits."""
        return sum(part.reserved_nbytes for part in self._waiting())

    def _waiting(self) -> tuple[GrowingTensor, ...]:
        return (*self.host_tokens.parts.values(), *self.host_factors.packed.values())

    @property
    def host_nbytes(self) -> int:
        tables = (self.segment_unit, self.segment_kind, self.segment_length, self.segment_position, self.segment_start)
        held = self.host_tokens.nbytes + self.host_factors.nbytes + sum(table.nbytes for table in tables)
        held += self.retired.nbytes + self.mass.nbytes
        held -= self.waiting_nbytes if self.device is not None else 0
        return held if self.components.summary is not None else held + self.lengths.nbytes + self.positions.nbytes

    def to_host(self) -> None:
        """Move what waits on the device to the host."""
        if self.device is not None:
            self.host_tokens, self.host_factors = self.host_tokens.moved(None), self.host_factors.moved(None)
            self.device = None

    def token_nbytes(self) -> int:
        """Device bytes of one unfolded token of one KV head: key, value, position, and which of the waiting tokens it is."""
        return self._token_nbytes

    def unit_nbytes(self) -> Tensor:
        """int64 [Hkv, M]: device bytes of each unit when it is unfolded, per KV head."""
        if self._costs is None or self._costs[0] is not self.segment_unit:  # replaced whenever units change
            self._costs = (self.segment_unit, self._unit_nbytes())
        return self._costs[1]

    @property
    def unit_nbytes_range(self) -> tuple[int, int]:
        """The smallest and the largest of `unit_nbytes`, 0 without units."""
        if self._range is None or self._range[0] is not self.segment_unit:
            costs = self.unit_nbytes()
            found = (0, 0)
            if costs.numel():
                least, greatest = (costs[:1] if costs.stride(0) == 0 else costs).aminmax()  # one row is all heads'
                found = int(least), int(greatest)
            self._range = (self.segment_unit, found)
        return self._range[1]

    def _unit_nbytes(self) -> Tensor:
        heads = self.site.kv_heads
        per_segment = (self.segment_length * self.token_nbytes())[None]
        factored = self.segment_kind == FACTORS
        if factored.any():
            per_segment = per_segment.expand(heads, -1).clone()
            ids = self.segment_start[factored]
            per_segment[:, factored] = self.host_factors.span_nbytes()[:, ids] + 4 * self.segment_length[factored]
        rows = max(len(per_segment), len(self.segment_unit))  # one where heads do not differ
        out = torch.zeros(rows, self.count, dtype=torch.int64, device="cpu")
        if self.count:
            unit = self.segment_unit.expand(rows, -1)
            out.scatter_add_(1, unit.clamp(min=0), per_segment * (unit >= 0))
        return out.expand(heads, -1)

    # -- folding -----------------------------------------------------------------------------------------------------

    def fold(self, folding: Folding) -> None:
        """Add the units of `folding`, whose tensors are on the host."""
        if not len(folding.lengths):
            return
        summary, router, heads = self.components.summary, self.components.router, self.site.kv_heads
        mean_k = None
        if summary is not None:
            weights = folding.surprisal_weights() if summary.weights == "surprisal" else None
            mean_k = folding.mean(folding.k, weights)
            self.mean_k = self.room.joined("mean_k", self.mean_k, held(mean_k, summary.bits, self.dtype))
            if summary.attend:
                mean_v = folding.mean(folding.v, weights)
                self.mean_v = self.room.joined("mean_v", self.mean_v, held(mean_v, summary.bits, self.dtype))
            if weights is not None:
                self.mass = _same_rows(self.mass, folding.surprisal_mass(), heads)
        parts = self.index_parts
        if parts and router is not None:
            built = router.build(self.site, folding, mean_k)
            for name, part in parts.items():
                self._append_index(name, part, built[name])
        if self.components.host_form != "none":
            self._store(folding, mean_k)
        rows = folding.sizes.shape[0]
        where = folding.positions.float()[None, :, None].expand(rows, -1, -1)
        self.lengths = _same_rows(self.lengths, folding.sizes.to(torch.int32), heads)
        self.positions = _same_rows(self.positions, folding.mean(where)[..., 0].to(torch.int32), heads)

    def _append_index(self, name: str, part: IndexPart, x: Tensor) -> None:
        new = x.to(part.dtype) if part.bits is None else quantize(x, part.bits)
        self.index[name] = self.room.joined(name, self.index.get(name), new)

    def _store(self, folding: Folding, mean_k: Tensor | None) -> None:
        k, v, positions, lengths = folding.k, folding.v, folding.positions, folding.lengths
        ends = lengths.cumsum(0)
        starts = ends - lengths
        factors: dict[int, list[dict[str, Tensor]]] = {}
        if self.components.forms is not None and mean_k is not None and folding.units is None:
            factors = self.components.forms.factorize_spans(self.site, k, v, starts, lengths, mean_k)
        is_factored = torch.zeros(len(lengths), dtype=torch.bool, device="cpu")
        waits_from = self.host_tokens.length + starts
        if factors:
            is_factored[list(factors)] = True
            columns = [[factors[span][head] for span in sorted(factors)] for head in range(self.site.kv_heads)]
            number = self.host_factors.spans + is_factored.long().cumsum(0) - 1
            self.host_factors.append(columns, lengths[is_factored])
            keep = ~is_factored.repeat_interleave(lengths)
            k, v = k[:, keep], v[:, keep]
            waiting = torch.where(is_factored, 0, lengths)
            waits_from = torch.where(is_factored, number, self.host_tokens.length + waiting.cumsum(0) - waiting)
        self.host_tokens.append(k, v)
        units = (
            torch.arange(len(lengths), dtype=torch.int64, device="cpu")[None]
            if folding.units is None
            else folding.units
        )
        self.segment_unit = _same_rows(self.segment_unit, self.count + units, self.site.kv_heads)
        self.segment_kind = torch.cat([self.segment_kind, is_factored.long()])
        self.segment_length = torch.cat([self.segment_length, lengths])
        self.segment_position = torch.cat([self.segment_position, positions[starts].long()])
        self.segment_start = torch.cat([self.segment_start, waits_from])

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def merge(self, pairs: int, longest: int) -> int:
        """Merge up to `pairs` pairs of neighbours, the shortest together first, none longer than `longest` tokens.

        Means are combined by what their tokens weigh: they stay those of Eq. 2. Returns how many pairs were merged.
        """
        if self.count < 2 or pairs < 1 or not self._mergeable:
            return 0
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
        if lefts:
            self._join(sorted(lefts))
        return len(lefts)

    def open_tokens(self, position: int) -> int:
        """Tokens of the last unit, where the token at `position` is the one behind its last; else 0."""
        if not self.count or self.segment_unit.shape[0] > 1 or int(self.segment_unit[0, -1]) != self.count - 1:
            return 0
        follows = int(self.segment_position[-1] + self.segment_length[-1]) == position
        return int(self.lengths[0, -1]) if follows else 0

    def go_on(self, unit: int, longest: int) -> bool:
        """Make one of `unit` and the one before it, if its first token follows on the last of that and both have at most `longest`
        tokens; whether that was so. Units of which nothing waits are not joined."""
        if not 0 < unit < self.count or not self._mergeable:
            return False
        together = self.lengths[:, unit - 1 : unit + 1].sum(1)
        before, own = (torch.nonzero(self.segment_unit[0] == number)[:, 0] for number in (unit - 1, unit))
        if not len(before) or not len(own) or int(together.max()) > longest:
            return False
        end = self.segment_position[before[-1]] + self.segment_length[before[-1]]
        if not torch.equal(end, self.segment_position[own[0]]):
            return False
        self._join([unit - 1])
        return True

    @property
    def _mergeable(self) -> bool:
        parts = self.index_parts.values()
        return self.segment_unit.shape[0] == 1 and all(part.merge != "never" for part in parts)

    def _join(self, lefts: Sequence[int]) -> None:
        """Make one of each of the units `lefts`, ascending, and the unit after it. All others stay as they are, bit for bit."""
        pairs = Pairs(lefts)
        first, second = pairs.of(self.lengths)
        total = first + second
        by_size = first / total
        by_mass, mass = by_size, None
        if self.mass.numel():
            first, second = pairs.of(self.mass)
            mass = first + second
            by_mass = torch.where(mass > 0, first / mass.clamp(min=1e-20), by_size)
        mean_k = None if self.mean_k is None else pairs.mean(self.mean_k, by_mass)
        index = {}
        for name, part in self.index_parts.items():
            old = self.index[name]
            if part.merge == "rebuild":
                made = self.components.router.rebuild(self.site, name, mean_k)
            elif part.merge == "mean":
                made = pairs.mean(old, by_size)
            else:
                made = (torch.minimum if part.merge == "min" else torch.maximum)(*pairs.of(old))
            index[name] = pairs.joined(old, made)
        self.index = index
        if self.mean_v is not None:
            self.mean_v = pairs.joined(self.mean_v, pairs.mean(self.mean_v, by_mass))
        if self.mean_k is not None:
            self.mean_k = pairs.joined(self.mean_k, mean_k)
        if mass is not None:
            self.mass = pairs.joined(self.mass, mass)
        self.positions = pairs.joined(self.positions, pairs.mean(self.positions[..., None], by_size)[..., 0])
        number = pairs.numbers(self.count)
        self.lengths = pairs.joined(self.lengths, total)
        self.segment_unit = torch.where(self.segment_unit >= 0, number[self.segment_unit.clamp(min=0)], -1)

    def archive(self, units: int) -> int:
        """Take the oldest `units` units off the device: they stay on the host, unrouted and unattended.

        Returns by how many the numbers of the segments fell, as the first of them retired.
        """
        units = min(units, self.count)
        keep = slice(units, None)
        self.lengths, self.positions, self.mass = (
            x[:, keep].clone() for x in (self.lengths, self.positions, self.mass)
        )
        for name in ("mean_k", "mean_v"):
            packed = getattr(self, name)
            if packed is not None:
                setattr(self, name, packed[:, keep].clone())
        self.index = {name: part[:, keep].clone() for name, part in self.index.items()}
        self.segment_unit = torch.where(self.segment_unit >= units, self.segment_unit - units, -1)
        return self._retire()

    def _retire(self) -> int:
        """Shorten the tables by the first segments that nothing routes to, so that a step's work does not grow with them."""
        routed = (self.segment_unit >= 0).any(0)
        count = int(routed.int().argmax()) if bool(routed.any()) else len(routed)
        tokens = self.segment_kind[:count] == TOKENS
        columns = (self.segment_position, self.segment_length, self.segment_start)
        self.retired.append(torch.stack([column[:count][tokens] for column in columns], 1)[None])
        self.segment_unit = self.segment_unit[:, count:].clone()
        for name in ("segment_kind", "segment_length", "segment_position", "segment_start"):
            setattr(self, name, getattr(self, name)[count:].clone())
        return count

    def waiting_places(self) -> tuple[Tensor, Tensor]:
        """(places in `host_tokens`, positions), int64 [n] each: of every token that waits as such, routed to or not."""
        kept = self.segment_kind == TOKENS
        columns = (self.segment_position, self.segment_length, self.segment_start)
        position, length, start = torch.cat([self.retired.data[0], torch.stack([x[kept] for x in columns], 1)]).unbind(
            1
        )
        return ranges(start, length), ranges(position, length)

    # -- unfolding ---------------------------------------------------------------------------------------------------

    @property
    def places(self) -> Places:
        """Where the tokens of each unit wait."""
        if self._places is None or self._places[0] is not self.segment_unit:  # replaced whenever units change
            waiting, retired, segments, unit = (
                self.host_tokens.length,
                self.retired.data[0],
                self.segments,
                self.segment_unit,
            )
            if self.has_factors:
                own = self.segment_kind == TOKENS
                segments = Segments(segments.length[own], segments.position[own], segments.start[own])
                unit = unit[:, own]
            self._places = (self.segment_unit, places_of(segments, unit, self.count, waiting, retired))
        return self._places[1]

    def step_tensors(self) -> dict[str, Tensor]:
        """What a step's graph reads of the units, in buffers: numbers beyond `count`, and beyond the tokens that wait, say nothing."""
        if self._step is None or any(old is not new for old, new in zip(self._step[0], self._made_of)):
            made = self._step_tensors()
            self._step = (self._made_of, made)
        return self._step[1]

    @property
    def _made_of(self) -> tuple[object, ...]:
        """What is replaced whenever units change, or leave the device."""
        return self.lengths, self.segment_unit, self.host_tokens

    def _step_tensors(self) -> dict[str, Tensor]:
        self._settle()
        out: dict[str, Tensor] = {}
        parts: dict[str, Quantized | Tensor | None] = dict(self.index)
        if self.components.summary is not None:
            parts |= {
                "mean_k": self.mean_k,
                "mean_v": self.mean_v,
                "lengths": self.lengths,
                "positions": self.positions,
            }
        if self.components.unfold and self.components.router is not None:
            out |= self._waiting_tensors()
            parts |= {"lengths": self.lengths} if self.places.bounds is not None else {}
            parts |= {} if self.components.derived is None else self.components.derived.derived(self)
        for name, part in parts.items():
            if isinstance(part, Quantized):
                out[f"{name}.codes"] = self.room.whole(f"{name}.codes", part.codes)
                out[f"{name}.scale"] = self.room.whole(f"{name}.scale", part.scale)
            elif part is not None:
                out[name] = self.room.whole(name, part)
        return out

    def _settle(self) -> None:
        """Have what is kept of the units begin buffers, so that a step reads it where it is."""
        self.index = {name: self.room.settled(name, part) for name, part in self.index.items()}
        if self.components.summary is not None:
            self.mean_k, self.mean_v = (
                self.room.settled("mean_k", self.mean_k),
                self.room.settled("mean_v", self.mean_v),
            )
            self.lengths, self.positions = (
                self.room.settled(name, x) for name, x in (("lengths", self.lengths), ("positions", self.positions))
            )

    def _waiting_tensors(self) -> dict[str, Tensor]:
        """What waits, and where."""
        places, waiting = self.places, {name: part.stored for name, part in self.host_tokens.parts.items()}
        out = {f"waiting.{name}": x for name, x in waiting.items()}
        if places.bounds is not None:
            behind = room_for(self.count) - self.count
            out["places.bounds"] = torch.nn.functional.pad(places.bounds, (0, behind), value=EMPTY)  # in order
        if places.order is not None:  # as many places as there is room for
            behind = waiting["k"].shape[1] - places.order.shape[1]
            out["places.order"] = torch.nn.functional.pad(places.order, (0, behind))
        if places.where is not None:
            behind = waiting["k"].shape[1] - places.where.shape[1]
            out["places.where"] = torch.nn.functional.pad(places.where, (0, behind))
        return out

    @property
    def room_kinds(self) -> RoomKinds:
        """What a slot for an unfolded token has on the device."""
        return room_kinds(self.site.key_dim, self.site.value_dim, self.dtype, self.components.exact_form)

    @property
    def has_factors(self) -> bool:
        """Whether some segments wait as factors."""
        return self.host_factors.spans > 0

    @property
    def segments(self) -> Segments:
        """Where the tokens of each segment are; of factored ones their number."""
        known = self._segments
        if known is None or known.start is not self.segment_start:  # replaced whenever segments change
            self._segments = Segments(self.segment_length, self.segment_position, self.segment_start)
        return self._segments

    def segments_of(self, units: Tensor) -> Tensor:
        """The segments bool [Hkv, S] of the units bool [Hkv, M], each head its own."""
        if self._plain is None or self._plain[0] is not self.segment_unit:  # replaced whenever units change
            own = torch.arange(self.count, dtype=torch.int64, device="cpu")[None]
            self._plain = (
                self.segment_unit,
                self.segment_unit.shape == own.shape and torch.equal(self.segment_unit, own),
            )
        if self._plain[1]:
            return units
        segment_unit = self.segment_unit.expand(self.site.kv_heads, -1)
        return units.gather(1, segment_unit.clamp(min=0)) & (segment_unit >= 0)

    def units_of(self, segment: Tensor) -> Tensor:
        """The units int64 [Hkv, s] that segments [Hkv, s] are of; -1 for -1."""
        unit = self.segment_unit.expand(self.site.kv_heads, -1).gather(1, segment.clamp(min=0))
        return torch.where(segment >= 0, unit, -1)

    def unfolded_nbytes(self, chosen: Tensor) -> int:
        """Device bytes of the tokens of the units `chosen` bool [Hkv, M], in as many slots as they need."""
        return int(self.places.tokens(chosen).max()) * self.token_nbytes() * self.site.kv_heads

    def unfold_factors(
        self, chosen: Tensor, resident: UnfoldedFactors | None, device: torch.device
    ) -> UnfoldedFactors | None:
        """The factored ones of the segments `chosen` bool [Hkv, S], on `device`; None where there are none. What `resident` holds
        is not fetched."""
        factored = self.segment_kind == FACTORS
        if not self.has_factors or not bool(chosen[:, factored].any()):
            return None
        segments = torch.nonzero(factored)[:, 0]
        picked = _padded([torch.nonzero(row)[:, 0] for row in chosen[:, segments]])
        number = segments[picked.clamp(min=0)]
        ids = torch.where(picked >= 0, self.segment_start[number], -1)
        parts, moved, held = gather_factors(self.host_factors, ids, resident)
        inside = torch.arange(parts["key_u"].shape[2], dtype=torch.int64, device="cpu")
        positions = (self.segment_position[number][..., None] + inside).to(device, torch.int32)
        moved = 0 if self.device is not None else moved
        parts = {kind: x.to(device) for kind, x in parts.items()}
        return UnfoldedFactors(parts, ids, positions, self.units_of(torch.where(picked >= 0, number, -1)), moved, held)

    def clone(self) -> FoldedSpans:
        copy = object.__new__(FoldedSpans)
        self.room = Roomy()  # what was in the old one belongs to both
        copy.__dict__.update(self.__dict__)
        copy.room, self._step, copy._step = Roomy(), None, None
        copy.host_tokens, copy.host_factors = self.host_tokens.clone(), self.host_factors.clone()
        copy.retired = self.retired.clone()
        copy.index, copy._there = dict(self.index), None
        return copy  # every other tensor is replaced, never written in place


def _same_rows(old: Tensor, new: Tensor, heads: int) -> Tensor:
    """old, new [Hkv|1, m] one behind the other; all rows where either has its own per head."""
    if old.shape[0] != new.shape[0]:
        old, new = old.expand(heads, -1), new.expand(heads, -1)
    return torch.cat([old, new], 1)


def _padded(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths -> int64 [H, longest], padded with -1."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
