"""What is folded in one KV store of one row: summaries and indexes on the device, tokens or factors on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.ir.site import AttentionSite
from semkv.runtime.budgets.costs import exact_nbytes
from semkv.runtime.components import Components, IndexPart
from semkv.runtime.host.pool import GrowingTensor, HostFactors, HostTokens, RoomKinds, room_kinds
from semkv.runtime.host.tier import HostTier
from semkv.runtime.store.device_index import DeviceIndex
from semkv.runtime.store.factors import UnfoldedFactors, gather_factors
from semkv.runtime.store.pairs import Pairs
from semkv.runtime.store.places import Places, ranges
from semkv.runtime.store.quantization import (
    Quantized,
    dequantize,
    held,
    norms,
    on_host,
    products,
    quantize,
    tensors_of,
)
from semkv.runtime.store.roomy import Roomy, room_for
from semkv.runtime.store.segments import Folding
from semkv.runtime.store.tables import FACTORS, Tables, range_of
from semkv.runtime.text import Once


class FoldedSpans:
    """Folded units in the order in which they were made. A unit is routed to and unfolded whole. It is one or more stored
    segments, each raw tokens or factors: spans merge as the sequence grows, and some units are not runs of tokens. Heads
    share their units or have their own: `tables` say which there are and where their tokens wait; stores that begin with the same tables
    and fold alike share them.

    Device: where the method has a summary, mean keys and values [Hkv, M], quantised or in the KV dtype, lengths and mean positions
    int32 [Hkv|1, M]; the router's index, by name, [rows, M, ...]. Host: tokens, factors and tables. Segments that nothing routes to any
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
        tables: Tables | None = None,
    ) -> None:
        """device: where folded tokens and factors wait; None: on the host, in `tier`. tables: empty ones that other stores of the row begin
        with as well."""
        self.site, self.components, self.dtype, self.device = site, components, dtype, device
        heads = site.kv_heads
        form = "raw" if components.host_form == "none" else components.host_form  # then it stays empty
        dims = (heads, site.key_dim, site.value_dim, dtype)
        self.host_tokens = HostTokens(*dims, form, tier=tier, device=device)
        self.host_factors = HostFactors(*dims, tier=tier, device=device)
        self.tables = Tables.empty() if tables is None else tables
        self.retired = GrowingTensor(1, (3,), torch.int64)
        self.mean_k: Quantized | Tensor | None = None
        self.mean_v: Quantized | Tensor | None = None
        self.index: dict[str, Quantized | Tensor] = {}
        self._token_nbytes = exact_nbytes(site, components, dtype) + 8
        self._costs: tuple[Tables, Tensor] | None = None
        self._held: tuple[Tables, int] | None = None
        self._directions: tuple[Tables, Quantized | Tensor] | None = None
        self._there: DeviceIndex | None = None
        self._step: tuple[tuple[object, ...], dict[str, Tensor]] | None = None
        self._places: tuple[Tables, int, Places] | None = None
        self.room = Roomy()
        self.known: tuple[tuple[object, ...], Tensor] | None = None
        """What a router has computed of the units, and of what."""

    @property
    def lengths(self) -> Tensor:
        """int32 [Hkv|1, M]: tokens of each unit."""
        return self.tables.lengths

    @property
    def positions(self) -> Tensor:
        """int32 [Hkv|1, M]: where each unit is, on the mean."""
        return self.tables.positions

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
        if self._directions is None or self._directions[0] is not self.tables:  # replaced whenever units change
            length = norms(mean).clamp(min=1e-12)[..., None]
            made: Quantized | Tensor
            if isinstance(mean, Quantized):
                made = Quantized(mean.codes, mean.scale.float() / length, mean.bits, mean.dim)
            else:
                made = mean.float() / length
            self._directions = (self.tables, made)
        return self._directions[1]

    def products(self, q: Tensor, name: str) -> Tensor:
        """float32 q [H, R, dim] times one tensor of the index: [H, R, M]."""
        return products(q, self.index[name])

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Units that can be routed to."""
        return self.tables.count

    @property
    def run_from(self) -> int | None:
        """See `Tables.run_from`."""
        return self.tables.run_from

    def device_tensors(self) -> list[Tensor]:
        parts: list[Quantized | Tensor | None] = [self.mean_k, self.mean_v, *self.index.values()]
        if self.components.summary is not None:
            parts += [self.lengths, self.positions]
        return [x for part in parts if part is not None for x in tensors_of(part)]

    @property
    def device_nbytes(self) -> int:
        """Bytes of `device_tensors`, with the room behind them that a step's graph reads them with."""
        if self._held is None or self._held[0] is not self.tables:  # replaced whenever units change
            columns = room_for(self.count)
            held: float = sum(x.nbytes // x.shape[1] * columns for x in self.device_tensors() if x.shape[1])
            if (
                self.site.once != 1
                and self.components.summary is not None
                and not getattr(self.components.segmenter, "per_head", False)
            ):
                held -= 8 * columns * (1 - self.site.once)  # lengths and positions are the same in all heads
            self._held = (self.tables, held)  # type: ignore[assignment]
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
        return (*self.host_tokens.parts.values(), self.host_factors.numbers)

    @property
    def host_nbytes(self) -> int:
        held = self.host_tokens.nbytes + self.host_factors.nbytes + self.tables.nbytes + self.retired.nbytes
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
        heads = self.site.kv_heads
        if not self.tables.holds_factors:
            return self.tables.unit_nbytes(self.token_nbytes()).expand(heads, -1)
        if self._costs is None or self._costs[0] is not self.tables:  # replaced whenever units change
            self._costs = (self.tables, self._factored_nbytes().expand(heads, -1))
        return self._costs[1]

    @property
    def unit_nbytes_range(self) -> tuple[int, int]:
        """The smallest and the largest of `unit_nbytes`, 0 without units."""
        if not self.tables.holds_factors:
            return self.tables.unit_nbytes_range(self.token_nbytes())
        return range_of(self.unit_nbytes())

    def _factored_nbytes(self) -> Tensor:
        tables = self.tables
        factored = tables.segment_kind == FACTORS
        per_segment = (tables.segment_length * self.token_nbytes())[None].repeat(self.site.kv_heads, 1)
        ids = tables.segment_start[factored]
        per_segment[:, factored] = self.host_factors.span_nbytes()[:, ids] + 4 * tables.segment_length[factored]
        return tables.sums(per_segment)

    # -- folding -----------------------------------------------------------------------------------------------------

    def fold(self, folding: Folding, shared: Once | None = None) -> None:
        """Add the units of `folding`. What is kept of them is computed where its tensors are, and held on the host. shared: by the stores
        of a row that change at a time, here and below; see `Tables`."""
        cut, there = folding.shared, folding.cut
        if not len(cut.lengths):
            return
        summary, router, heads = self.components.summary, self.components.router, self.site.kv_heads
        mean_k, weighted = None, False
        if summary is not None:
            weighted = summary.weights == "surprisal"
            weights = there.surprisal_weights if weighted else None
            mean_k = there.mean(folding.k, weights)
            self.mean_k = self.room.joined("mean_k", self.mean_k, on_host(held(mean_k, summary.bits, self.dtype)))
            if summary.attend:
                mean_v = held(there.mean(folding.v, weights), summary.bits, self.dtype)
                self.mean_v = self.room.joined("mean_v", self.mean_v, on_host(mean_v))
        parts = self.index_parts
        if parts and router is not None:
            built = router.build(self.site, folding, mean_k)
            for name, part in parts.items():
                self._append_index(name, part, built[name])
        before = self.host_tokens.length
        if self.components.host_form == "none":
            self.tables = self.tables.folded(cut, heads, weighted=weighted, waits_from=None, shared=shared)
            return
        factors: dict[int, list[dict[str, Tensor]]] = {}
        if self.components.forms is not None and mean_k is not None and cut.units is None:
            forms = self.components.forms
            factors = forms.factorize_spans(self.site, folding.k, folding.v, cut.starts, cut.lengths, mean_k.cpu())
        if factors:
            self._store_factors(folding, factors, weighted)
        else:
            self.host_tokens.append(folding.k, folding.v)
            self.tables = self.tables.folded(cut, heads, weighted=weighted, waits_from=before, shared=shared)

    def _append_index(self, name: str, part: IndexPart, x: Tensor) -> None:
        new = x.to(part.dtype) if part.bits is None else quantize(x, part.bits)
        self.index[name] = self.room.joined(name, self.index.get(name), on_host(new))

    def _store_factors(self, folding: Folding, factors: Mapping[int, list[dict[str, Tensor]]], weighted: bool) -> None:
        """Keep some of the spans as `factors`, by their number and head, and the others as tokens."""
        lengths, heads = folding.shared.lengths, self.site.kv_heads
        factored = torch.zeros(len(lengths), dtype=torch.bool, device="cpu")
        factored[list(factors)] = True
        columns = [[factors[span][head] for span in sorted(factors)] for head in range(heads)]
        number = self.host_factors.spans + factored.long().cumsum(0) - 1
        self.host_factors.append(columns, lengths[factored])
        waiting = torch.where(factored, 0, lengths)
        waits_from = torch.where(factored, number, self.host_tokens.length + waiting.cumsum(0) - waiting)
        keep = ~factored.repeat_interleave(lengths)
        self.host_tokens.append(folding.k[:, keep], folding.v[:, keep])
        self.tables = self.tables.factored(
            folding.shared, heads, weighted=weighted, waits_from=waits_from, factored=factored
        )

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def merge(self, pairs: int, longest: int, shared: Once | None = None) -> int:
        """Merge up to `pairs` pairs of neighbours, the shortest together first, none longer than `longest` tokens.

        Means are combined by what their tokens weigh: they stay those of Eq. 2. Returns how many pairs were merged.
        """
        if self.count < 2 or pairs < 1 or not self._mergeable:
            return 0
        lefts = self.tables.shortest_pairs(pairs, longest)
        if lefts:
            self._join(lefts, shared)
        return len(lefts)

    def open_tokens(self, position: int) -> int:
        """Tokens of the last unit, where the token at `position` is the one behind its last; else 0."""
        return self.tables.open_tokens(position)

    def go_on(self, unit: int, longest: int, shared: Once | None = None) -> bool:
        """Make one of `unit` and the one before it, if its first token follows on the last of that and both have at most `longest`
        tokens; whether that was so. Units of which nothing waits are not joined."""
        if not 0 < unit < self.count or not self._mergeable or not self.tables.goes_on(unit, longest):
            return False
        self._join((unit - 1,), shared)
        return True

    @property
    def _mergeable(self) -> bool:
        parts = self.index_parts.values()
        return self.tables.segment_unit.shape[0] == 1 and all(part.merge != "never" for part in parts)

    def _join(self, lefts: tuple[int, ...], shared: Once | None = None) -> None:
        """Make one of each of the units `lefts`, ascending, and the unit after it. All others stay as they are, bit for bit."""
        pairs, tables = Pairs(lefts), self.tables.joined(lefts, shared)
        assert tables.shares is not None
        by_size, by_mass = tables.shares
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
        self.tables = tables

    def archive(self, units: int, shared: Once | None = None) -> int:
        """Take the oldest `units` units off the device: they stay on the host, unrouted and unattended.

        Returns by how many the numbers of the segments fell, as the first of them retired.
        """
        units, before = min(units, self.count), len(self.tables.segment_kind)
        keep = slice(units, None)
        for name in ("mean_k", "mean_v"):
            packed = getattr(self, name)
            if packed is not None:
                setattr(self, name, packed[:, keep].clone())
        self.index = {name: part[:, keep].clone() for name, part in self.index.items()}
        self.tables = self.tables.without_oldest(units, shared)
        assert self.tables.retired is not None
        self.retired.append(self.tables.retired[None])
        return before - len(self.tables.segment_kind)

    def waiting_places(self) -> tuple[Tensor, Tensor]:
        """(places in `host_tokens`, positions), int64 [n] each: of every token that waits as such, routed to or not."""
        position, length, start = torch.cat([self.retired.data[0], self.tables.waiting()]).unbind(1)
        return ranges(start, length), ranges(position, length)

    # -- unfolding ---------------------------------------------------------------------------------------------------

    @property
    def places(self) -> Places:
        """Where the tokens of each unit wait."""
        tables, waiting = self.tables, self.host_tokens.length
        if self._places is None or self._places[0] is not tables or self._places[1] != waiting:
            self._places = tables, waiting, tables.places(waiting, self.retired.data[0])
        return self._places[2]

    def step_tensors(self) -> dict[str, Tensor]:
        """What a step's graph reads of the units, in buffers: numbers beyond `count`, and beyond the tokens that wait, say nothing."""
        if self._step is None or any(old is not new for old, new in zip(self._step[0], self._made_of)):
            made = self._step_tensors()
            self._step = (self._made_of, made)
        return self._step[1]

    @property
    def _made_of(self) -> tuple[object, ...]:
        """What is replaced whenever units change, or leave the device."""
        return self.tables, self.host_tokens

    def _step_tensors(self) -> dict[str, Tensor]:
        self._settle()
        out: dict[str, Tensor] = {}
        parts: dict[str, Quantized | Tensor | None] = dict(self.index)
        if self.components.summary is not None:
            parts |= {"mean_k": self.mean_k, "mean_v": self.mean_v}
            out |= {name: self.tables.roomy(name) for name in ("lengths", "positions")}
        if self.components.unfold and self.components.router is not None:
            out |= self._factor_tensors() if self.all_factors else self._waiting_tensors()
            out |= {"lengths": self.tables.roomy("lengths")} if self.places.bounds is not None else {}
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

    def _waiting_tensors(self) -> dict[str, Tensor]:
        """What waits, and where."""
        waiting = {name: part.stored for name, part in self.host_tokens.parts.items()}
        out = {f"waiting.{name}": x for name, x in waiting.items()}
        return out | self.tables.roomy_places(self.places, waiting["k"].shape[1])

    def _factor_tensors(self) -> dict[str, Tensor]:
        """Spans by their number among the factored ones, as `semkv::factored_attention_` reads them, and the bytes of units."""
        factors, tables = self.host_factors, self.tables
        number, behind = tables.segment_start, room_for(factors.spans) - factors.spans
        unit = torch.full((len(tables.segment_unit), factors.spans + behind), -1, dtype=torch.int64, device="cpu")
        unit[:, number] = tables.segment_unit
        spans = pad(torch.stack([factors.lengths, torch.zeros_like(factors.lengths)], 1), (0, 0, 0, behind))
        spans[number, 1] = tables.segment_position
        where = torch.stack([factors.offsets, factors.key_rank, factors.value_rank], -1)
        costs = self.unit_nbytes().to(torch.int32)
        return {
            "factors.data": factors.numbers.stored[0],
            "factors.where": pad(where, (0, 0, 0, behind)),
            "factors.spans": spans,
            "factors.unit": unit,
            "factors.costs": pad(costs, (0, room_for(self.count) - self.count)),
        }

    @property
    def room_kinds(self) -> RoomKinds:
        """What a slot for an unfolded token has on the device."""
        return room_kinds(self.site.key_dim, self.site.value_dim, self.dtype, self.components.exact_form)

    @property
    def has_factors(self) -> bool:
        """Whether some segments wait as factors."""
        return self.host_factors.spans > 0

    @property
    def all_factors(self) -> bool:
        """Whether all segments do."""
        return self.has_factors and not self.host_tokens.length

    @property
    def factor_sizes(self) -> tuple[int, int] | None:
        """The most tokens and components of a span, rounded up, so that few of them give another graph; None where none is factored."""
        if not self.has_factors:
            return None
        longest, rank = self.host_factors.largest
        return -(-longest // 16) * 16, -(-rank // 8) * 8

    def segments_of(self, units: Tensor) -> Tensor:
        """The segments bool [Hkv, S] of the units bool [Hkv, M], each head its own."""
        if self.tables.alone:
            return units
        segment_unit = self.tables.segment_unit.expand(self.site.kv_heads, -1)
        return units.gather(1, segment_unit.clamp(min=0)) & (segment_unit >= 0)

    def units_of(self, segment: Tensor) -> Tensor:
        """The units int64 [Hkv, s] that segments [Hkv, s] are of; -1 for -1."""
        unit = self.tables.segment_unit.expand(self.site.kv_heads, -1).gather(1, segment.clamp(min=0))
        return torch.where(segment >= 0, unit, -1)

    def unfolded_nbytes(self, chosen: Tensor) -> int:
        """Device bytes of the tokens of the units `chosen` bool [Hkv, M], in as many slots as they need."""
        return int(self.places.tokens(chosen).max()) * self.token_nbytes() * self.site.kv_heads

    def factored_of(self, chosen: Tensor) -> Tensor | None:
        """int64 [Hkv, F]: the segments of the units `chosen` bool [Hkv, M] that wait as factors, -1 pads; None where there are none."""
        if not self.has_factors:
            return None
        segments = torch.nonzero(self.tables.segment_kind == FACTORS)[:, 0]
        of_heads = self.segments_of(chosen)[:, segments]
        if not bool(of_heads.any()):
            return None
        picked = _padded([torch.nonzero(row)[:, 0] for row in of_heads])
        return torch.where(picked >= 0, segments[picked.clamp(min=0)], -1)

    def _factor_numbers(self, segments: Tensor) -> Tensor:
        """int64 [Hkv, F]: what `segments` are among the factored spans; -1 for -1."""
        return torch.where(segments >= 0, self.tables.segment_start[segments.clamp(min=0)], -1)

    def factored_nbytes(self, segments: Tensor | None) -> int:
        """Device bytes of `segments` of `factored_of` when they are unfolded, padding included."""
        if segments is None:
            return 0
        rank, longest = self.host_factors.padded(self._factor_numbers(segments))
        numbers = rank * (2 * longest + 2 + self.site.key_dim + self.site.value_dim)
        return segments.numel() * (numbers * self.dtype.itemsize + 4 * longest)

    def unfold_factors(
        self, segments: Tensor, resident: UnfoldedFactors | None, device: torch.device
    ) -> UnfoldedFactors:
        """`segments` of `factored_of`, on `device`. What `resident` holds is not fetched."""
        number, ids = segments.clamp(min=0), self._factor_numbers(segments)
        parts, moved, held = gather_factors(self.host_factors, ids, resident)
        inside = torch.arange(parts["key_u"].shape[2], dtype=torch.int64, device="cpu")
        positions = (self.tables.segment_position[number][..., None] + inside).to(device, torch.int32)
        moved = 0 if self.device is not None else moved
        parts = {kind: x.to(device) for kind, x in parts.items()}
        return UnfoldedFactors(parts, ids, positions, self.units_of(segments), moved, held)

    def clone(self) -> FoldedSpans:
        copy = object.__new__(FoldedSpans)
        self.room = Roomy()  # what was in the old one belongs to both
        copy.__dict__.update(self.__dict__)
        copy.room, self._step, copy._step = Roomy(), None, None
        copy.host_tokens, copy.host_factors = self.host_tokens.clone(), self.host_factors.clone()
        copy.retired = self.retired.clone()
        copy.index, copy._there = dict(self.index), None
        return copy  # every other tensor is replaced, never written in place


def _padded(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths -> int64 [H, longest], padded with -1."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
