"""The memory of one part of a KV store of one row: exact tokens, the recent window, folded units, and what a step unfolds."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_not

import torch
from torch import Tensor

from semkv.errors import BudgetError
from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite
from semkv.kernels.selection.cpp import MAX_ALLOWANCE
from semkv.runtime.budgets.costs import exact_nbytes
from semkv.runtime.components import Coarse, Components, Cutting
from semkv.runtime.decode.choosing import Zoom, choose_there, choose_units
from semkv.runtime.step import Step
from semkv.runtime.store.blocks import NEG_INF, bias_of, with_block, zoomed_units
from semkv.runtime.store.factors import FactorsRead, UnfoldedFactors
from semkv.runtime.store.mirror import StepSide, named
from semkv.runtime.store.quantization import quantize, tensors_of
from semkv.runtime.store.roomy import room_for, within
from semkv.runtime.store.segments import Boundary, Cut, Folding
from semkv.runtime.store.slots import Slots
from semkv.runtime.store.spans import FoldedSpans
from semkv.runtime.store.token_store import TokenStore, plain
from semkv.runtime.text import Once, Text

NOTHING: Mapping[str, Tensor] = {}


class SiteMemory:
    """Tensors of the KV heads that `site` has, without a batch dimension.

    kept: exact tokens that stay; recent: the newest ones; spans: what is folded, None where the method folds nothing;
    unit_state: where units stand before the recent tokens, see `semkv.runtime.components.Continuing`; boundary: from which surprisal on a
    token bounds a unit, where surprisal decides, see `semkv.runtime.components.Cutting`. of_prompt: the recent tokens that the prompt left,
    where those that follow it stay (`semkv.runtime.components.Generated`).

    slots: what the last step unfolded, None before the first; factors: of that, spans that are read as factors.
    reserved: tokens that may follow before anything is folded, dropped or changes its size, see `reserve`.
    there: what a step's graph reads besides these parts. _quiet: up to how many recent tokens, and from which allowance on, nothing has to
    leave; None where that is not known. _brought: what a step's graph reads of these parts, and the dicts that it was made of.
    reads_codes: whether the last step attended to what is folded by the router's index, see `semkv.runtime.components.Coarse`.
    """

    def __init__(
        self,
        site: AttentionSite,
        components: Components,
        kept: TokenStore,
        recent: TokenStore,
        spans: FoldedSpans | None,
        *,
        unit_state: int = 0,
        of_prompt: int = 0,
        boundary: Boundary | None = None,
        device: torch.device,
    ) -> None:
        self.site, self.components, self.device = site, components, device
        self.kept, self.recent, self.spans = kept, recent, spans
        self.unit_state, self.of_prompt, self.boundary = unit_state, of_prompt, boundary
        self.slots: Slots | None = None
        self.factors = FactorsRead()
        self.moved_nbytes = self.held_nbytes = 0
        self.reads_codes = False
        self.zoom: Zoom | None = None
        self._read: list[int] | None = None
        self.reserved = 0
        self._reserved_slots: tuple[int, float] | None = None
        self._quiet: tuple[int, float] | None = None
        self._brought: tuple[tuple[object, ...], dict[str, Tensor]] | None = None
        self.there = StepSide(device)

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def fixed_nbytes(self) -> int:
        """Device bytes that stay between steps: exact tokens, window, summaries and indexes."""
        spans = self.spans.device_nbytes if self.spans is not None else 0
        return self.kept.nbytes + self.recent.nbytes + spans

    @property
    def followed_nbytes(self) -> int:
        """Device bytes of the pages of recent tokens behind those that the prompt left."""
        return self.recent.nbytes - -(-self.of_prompt // self.recent.page_size) * self.page_nbytes

    @property
    def device_nbytes(self) -> int:
        """Device bytes with what is unfolded."""
        return self.fixed_nbytes + self.workspace_nbytes

    @property
    def attended_nbytes(self) -> int:
        """Bytes of the keys and values that the last step's attention read: exact and unfolded tokens, factors and summaries."""
        site, spans = self.site, self.spans
        size = self.recent.kv_nbytes
        read = self.kept.length * self.kept.kv_nbytes + self.recent.length * size
        if spans is None or not spans.count:
            return read
        if self.unfolds:
            read += self.factors.nbytes
            read += 0 if self.slots is None else self.slots.filled * size // site.kv_heads
        if self.components.summary is not None and self.components.summary.attend:
            read += sum(x.nbytes for mean in (spans.mean_k, spans.mean_v) for x in tensors_of(mean))
        return read + (spans.device_nbytes if self.reads_codes else 0)

    @property
    def workspace_nbytes(self) -> int:
        """Device bytes of what is unfolded, empty slots included."""
        return self.factors.nbytes + (0 if self.slots is None else self.slots.nbytes)

    @property
    def host_nbytes(self) -> int:
        return self.spans.host_nbytes if self.spans is not None else 0

    @property
    def reserved_nbytes(self) -> int:
        """Device bytes that are allocated ahead of need."""
        ahead = self.kept.reserved_nbytes + self.recent.reserved_nbytes
        return ahead + self.spans.reserved_nbytes if self.spans is not None and self.on_device else ahead

    @property
    def on_device(self) -> bool:
        """Whether what is folded waits on the device, because the sequence is shorter than the layer's threshold."""
        return self.spans is not None and self.spans.device is not None

    @property
    def resident_nbytes(self) -> int:
        """Device bytes of what waits there, which the budget does not count."""
        return self.spans.waiting_nbytes if self.on_device else 0

    def to_host(self) -> int:
        """Move what is folded to the host; the bytes that moved."""
        moved = self.resident_nbytes
        if self.on_device:
            self.spans.to_host()
        return moved

    @property
    def page_nbytes(self) -> int:
        """Device bytes of a page of recent tokens, all KV heads."""
        return self.recent.page_size * self.recent.token_nbytes

    @property
    def unfolds(self) -> bool:
        """Whether its method may bring folded tokens back."""
        return self.components.unfold and self.components.router is not None

    def unfolded_tokens(self, allowance: float) -> float:
        """Tokens over all KV heads that `allowance` device bytes for unfolded units hold."""
        most = self.components.most * self.site.kv_heads or float("inf")
        return min(most, allowance / self.spans.token_nbytes())

    @property
    def zoomed(self) -> Tensor | None:
        """bool [Hq, T, M]: the units that each query head reads unfolded in the last step; None where nothing is folded."""
        return None if self.zoom is None else self.zoom.heads

    @property
    def counts(self) -> tuple[list[int], int] | None:
        """(units that each query head read in the last step, summed over tokens; decisions of each); None where nothing is folded."""
        if self._read is not None:
            return self._read, self.spans.count
        if self.zoom is None:
            return None
        read, decisions = self.zoom.counts()
        return read.tolist(), decisions

    def slide(self, window: int) -> None:
        """Drop whole pages of what a sliding window of `window` tokens no longer sees."""
        if self.reserved:
            return
        excess = self.recent.length - (window - 1)
        if excess >= self.recent.page_size:
            self.recent.pop_front(excess)

    # -- new tokens --------------------------------------------------------------------------------------------------

    def append(
        self,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        text: Text,
        allowance: float,
        span_limit: float,
    ) -> None:
        """Store new tokens k [Hkv, t, D], v [Hkv, t, Dv], positions [t], behind those of `text`, and stay within `allowance`.

        allowance: device bytes for fixed parts; span_limit: device bytes that one unfolded span may take per KV head.
        """
        if not self._has_reserved(k.shape[1]) and allowance != float("inf"):
            self._make_room(k.shape[1], text, allowance, span_limit)
        self.recent.append(k, v, positions[None])

    def _make_room(self, tokens: int, text: Text, allowance: float, span_limit: float) -> None:
        """Fold, or drop, of the newest tokens of `text` what has to leave before `tokens` more come."""
        if self._quiet is not None and self.recent.length + tokens <= self._quiet[0] and allowance >= self._quiet[1]:
            return
        self._quiet = None
        page = self.recent.page_size
        if self.components.evictor is not None:
            self._contend(tokens, allowance)
            return
        if self.spans is None:
            most = int((allowance - self.kept.nbytes) // self.page_nbytes) * page
            over = self.recent.length + tokens - most
            if over > 0 and self.recent.length:
                drop = over if most <= page else -(-over // page) * page  # the only page stays full
                self.recent.pop_front(min(self.recent.length, drop))
            return
        chunk = self.components.fold_chunk
        most = self.window_tokens(allowance) + chunk
        while self.recent.length >= chunk:
            after = self.recent.length + tokens
            if after <= most and self.kept.nbytes + -(-after // page) * self.page_nbytes <= allowance:
                self._quiet = (min(most, -(-after // page) * page), allowance)
                break
            self._fold_oldest(chunk, text, allowance)
        self._shrink(allowance - (-(-(self.recent.length + tokens) // page) * self.page_nbytes), span_limit, text.found)

    def reserve(self, tokens: int, text: Text, allowance: float, span_limit: float, cap: float) -> None:
        """Make room for `tokens` more tokens, so that while they follow nothing is folded or dropped and no size changes: what has to leave
        within `allowance` (`append`) leaves now, and slots are what the window with its pages ahead leaves of `cap` bytes.

        Raises
        ------
        BudgetError: the window does not fit, or leaves no room for any folded unit. The memory is used up then.
        """
        self.reserved, self._reserved_slots = 0, None
        self.recent.hold(0)
        if allowance != float("inf"):
            self._make_room(tokens, text, allowance, span_limit)
        self.recent.hold(tokens)
        self.reserved = tokens
        least = 0
        if self.reads_units:
            least = max(1, self.spans.unit_nbytes_range[0]) * self.site.kv_heads
        room = cap - self.fixed_nbytes
        if room < least:
            most = max(0, int((room - least) // self.recent.token_nbytes) + tokens)
            raise BudgetError(
                f"no room for {tokens} tokens ahead in {self.site.name or f'layer {self.site.index}'}: they and what stays take "
                f"{self.fixed_nbytes + least} bytes of the {int(cap)} that its share of the budget has; reserve at most about {most}, "
                "or raise the budget"
            )
        if self.reads_units and not self.spans.has_factors:
            slots, usable = self._slots(self.site, room)
            assert slots is not None
            self._reserved_slots = (slots, usable)
            self._with_slots(self.site, slots)

    def _has_reserved(self, tokens: int) -> bool:
        """Whether there is room ahead for so many new tokens, which take it up; where there is less, there is none from now on."""
        if 0 < tokens <= self.reserved:
            self.reserved -= tokens
            return True
        if self.recent.held:
            self.reserved, self._reserved_slots = 0, None
            self.recent.hold(0)
        return False

    def room(self, allowance: float) -> tuple[int, int]:
        """(pages of exact tokens within `allowance` bytes, those of them that are the window's), where an evictor chooses."""
        page, heads = self.recent.page_size, self.site.kv_heads
        own = self.recent.token_nbytes + 4 * (
            heads - self.site.once * self.recent.positions.shape[0]
        )  # kept tokens have their own positions
        pages = int(allowance // (page * own))
        return pages, pages - self.components.evictor.places(pages * page, page) // page

    def _contend(self, tokens: int, allowance: float) -> None:
        """Where `tokens` more do not fit, those that leave the window and the kept ones contend, per KV head, for the places
        of the kept."""
        page, kept, recent = self.recent.page_size, self.kept, self.recent
        pages, window = self.room(allowance)
        if -(-kept.length // page) - (-(recent.length + tokens) // page) <= pages:
            return
        leaving = min(max(0, recent.length + tokens - window * page), recent.length)
        left = pages + (-(recent.length - leaving + tokens) // page)
        places = max(0, min(pages - window, left) * page)
        heads = self.site.kv_heads
        scores = torch.cat([kept.scores, recent.scores[:, :leaving]], 1)
        best = scores.topk(min(places, scores.shape[1]), dim=1).indices.sort(dim=1).values
        rows = torch.arange(heads, dtype=torch.int64, device=best.device)[:, None]
        k, v, positions = (
            torch.cat([old.expand(heads, *old.shape[1:]), new[:, :leaving].expand(heads, -1, *new.shape[2:])], 1)[
                rows, best
            ]
            for old, new in (
                (plain(kept.k), plain(recent.k)),
                (plain(kept.v), plain(recent.v)),
                (kept.positions, recent.positions),
            )
        )
        held_k, held_v = (x if kept.bits is None else quantize(x, kept.bits) for x in (k, v))
        self.kept = TokenStore(held_k, held_v, positions, page, scores=scores[rows, best])
        self.recent.pop_front(leaving)

    def window_tokens(self, allowance: float) -> int:
        """Tokens of the recent window within `allowance` bytes: at most the method's, and its share of the allowance."""
        page = self.recent.page_size
        pages = int(allowance * self.components.window_share // self.page_nbytes)
        return max(page, min(self.components.window, pages * page))

    def _fold_oldest(self, count: int, text: Text, allowance: float) -> None:
        """Fold the oldest `count` tokens of the window."""
        if self.components.cutting is not None:
            self._cut_oldest(self.components.cutting, count, text, allowance)
            return
        # They leave the device: units are made on the host.
        k, v, positions = (x.cpu() for x in self.recent.pop_front(count))
        newest, segmenter, longest = self.recent.length + count, self.components.segmenter, 0
        continuing, state = self.components.continuing, self.unit_state
        if continuing is not None:
            parts, goes_on, self.unit_state = text.found.of(
                (continuing, newest, count, state),
                lambda: continuing.segment_on(state, text.newest(newest, count)[0]),
            )
            longest = continuing.longest if goes_on else 0
        elif segmenter.per_store:
            parts = segmenter.segment_more(*text.newest(newest, count), k)
        else:
            parts = text.found.of(
                (segmenter, newest, count), lambda: segmenter.segment_more(*text.newest(newest, count), k)
            )
        at = self.spans.count
        self.spans.fold(Folding(k, v, Cut.of(parts, positions, newest, text)), text.found)
        if longest:
            self.spans.go_on(at, longest, text.found)

    def _cut_oldest(self, segmenter: Cutting, count: int, text: Text, allowance: float) -> None:
        """Of the oldest `count` tokens of the window keep exact and fold those that their surprisal says, the first unit perhaps going on
        with the last one."""
        spans, boundary, newest = self.spans, self.boundary, self.recent.length
        assert boundary is not None, "set when the prompt was read"
        token = self.site.kv_heads * exact_nbytes(self.site, self.components, spans.dtype) + 4 * self.site.once
        room, summaries = (x / token for x in (allowance, spans.device_nbytes))
        places = segmenter.places(room, self.kept.length, summaries, self.kept.page_size)
        before = spans.open_tokens(int(self.recent.positions[0, 0]))
        parts, goes_on = text.found.of(
            (segmenter, newest, count, boundary, before, places),
            lambda: segmenter.cut(text.newest(newest, count)[1], boundary, before, places),
        )
        k, v, positions = self.recent.pop_front(parts.recent)
        if len(parts.kept):
            at = parts.kept.to(k.device)
            self.kept.append(k[:, at], v[:, at], positions[:, at])
        k, v, positions = (x.cpu() for x in (k, v, positions))  # they leave the device: units are made on the host
        first, cut = spans.count, Cut.of(parts, positions, newest, text)
        at = parts.folded
        spans.fold(Folding(k[:, at], v[:, at], cut), text.found)
        if goes_on:
            spans.go_on(first, segmenter.max_span, text.found)

    def _shrink(self, room: float, span_limit: float, shared: Once | None = None) -> None:
        """Merge spans, then archive the oldest, until kept tokens and spans take at most `room` bytes."""
        spans = self.spans
        longest = max(1, int(span_limit // spans.token_nbytes()))
        while self.kept.nbytes + spans.device_nbytes > room and spans.count:
            held = spans.device_nbytes
            per_span = max(1.0, held / spans.count)
            excess = self.kept.nbytes + held - room
            pairs = max(1, int(excess / per_span) + 1)
            if not spans.merge(pairs, longest, shared):
                spans.archive(pairs, shared)
        if not spans.count:  # no step will unfold anything
            self.slots, self.factors = None, FactorsRead()

    # -- a step's graph ----------------------------------------------------------------------------------------------

    def fold_ahead(self, text: Text, allowance: float, span_limit: float) -> None:
        """What `admit` does before a token comes, which does nothing more then."""
        if not self.reserved and allowance != float("inf"):
            self._make_room(1, text, allowance, span_limit)

    def admit(self, text: Text, allowance: float, span_limit: float) -> int:
        """`append` of one token behind `text`, whose key and value a step's graph fills in: their place among the recent ones."""
        if not self._has_reserved(1) and allowance != float("inf"):
            self._make_room(1, text, allowance, span_limit)
        self.recent.reserve_one()
        self.recent.take_in()
        return self.recent.length - 1

    @property
    def reads_units(self) -> bool:
        """Whether a step's graph chooses among units."""
        return self.unfolds and self.spans is not None and self.spans.count > 0

    @property
    def graphed(self) -> bool:
        """Whether a step's graph can do all that its turn takes."""
        if not self.reads_units:
            return True
        here, spans, site = self.device.type == "cpu", self.spans, self.site
        if spans.has_factors:  # which are read where they wait
            return here and spans.all_factors and not site.has_bias and not site.chunk
        if not here and not (self.on_device or spans.host_tokens.locked):
            return False
        return not self.components.of_tokens or spans.places.length == 1

    def prepare(self, site: AttentionSite, allowance: float) -> tuple[int, int, int, int]:
        """Have slots within `allowance` bytes, for the turn of `site`: `semkv.runtime.decode.layer_step.NUMBERS` but for the first."""
        self.zoom, self._read, self.moved_nbytes, self.held_nbytes = None, None, 0, 0
        spans = self.spans
        if spans is None or not self.reads_units:
            if spans is not None and spans.count:
                self._read = [0] * site.q_heads
            return (0 if spans is None else spans.count), 0, 0, 0
        slots, usable = self._slots(site, allowance)
        if spans.has_factors:
            self.slots = None
            self.factors.hold(site.kv_heads, room_for(spans.host_factors.spans))
            return spans.count, int(min(usable / site.kv_heads, MAX_ALLOWANCE)), 0, 0
        assert slots is not None
        self._with_slots(site, slots)
        places = spans.places
        return spans.count, slots // places.length if places.length else slots, places.start, places.shift

    def step_tensors(self) -> dict[str, Tensor]:
        """What a step's graph reads and writes, by name, without a dimension of rows; numbers behind what is stored say nothing."""
        kept = self.kept.tensors if self.kept.length else NOTHING
        units, slots = NOTHING, NOTHING
        if self.spans is not None and self.spans.count:
            units = self.there.units.tensors(self.spans.step_tensors())
            if self.slots is not None and self.reads_units:
                slots = self.slots.tensors
        factors = self.factors.held if units else NOTHING
        made_of = (self.recent.tensors, kept, units, slots, factors)  # dicts that are replaced when a tensor is
        if self._brought is None or any(map(is_not, self._brought[0], made_of)):
            made = {
                **named("recent", made_of[0]),
                **named("kept", kept),
                **units,
                **named("slots", slots),
                **named("factors", factors),
            }
            self._brought = (made_of, made)
        return self._brought[1]

    def took(self, moved: int, held: int, read: list[int]) -> None:
        """A turn has copied so many tokens to the slots, over all heads, and found so many there, or bytes of factors; each KV head, or
        query head, has read so many units."""
        assert self.spans is not None
        if self.spans.has_factors:
            size, self.factors.nbytes = 1, moved + held
        else:
            assert self.slots is not None
            size, self.slots.filled = self.spans.host_tokens.token_nbytes, moved + held
        self.moved_nbytes, self.held_nbytes = (0 if self.on_device else moved * size), held * size
        group = self.site.q_heads // len(read)
        self._read = read if group == 1 else [units for units in read for _ in range(group)]
        self.reads_codes = self.components.rest is not None and self.components.rest.has_rest(self.site)

    # -- attention ---------------------------------------------------------------------------------------------------

    def entries(self, site: AttentionSite, q: Tensor, workspace_allowance: float, step: Step) -> Entries:
        """What `site` attends to for q [Hq, T, D]; `workspace_allowance` is device bytes for unfolded units.

        The result has no batch dimension; keys and values are in the KV dtype, those of coarse entries in codes.
        """
        self.moved_nbytes = self.held_nbytes = 0
        self.zoom, self._read, self.reads_codes = None, None, False
        if self.components.evictor is not None and site.index == self.site.index:
            self._score(site, q, step)
        stored = [part for part in (self.kept, self.recent) if part.length]
        entries = Entries([], [], [])
        for part in stored:
            entries = with_block(entries, part.k, part.v, part.positions, None)
        if self.spans is None or not self.spans.count:
            return entries
        spans, components = self.spans, self.components
        score = None
        if components.unfold and components.router is not None:
            self.zoom, factors, score = self._unfold(site, q, workspace_allowance, step)
            entries = self._with_tokens(entries, site, self.slots)
            entries = entries if factors is None else self._with_factors(entries, site, factors)
        else:
            self.zoom = Zoom(
                torch.zeros(site.kv_heads, spans.count, dtype=torch.bool, device="cpu"), site.group_size, q.shape[1]
            )
        if components.summary is not None and components.summary.attend:
            there = spans.on(self.device)
            bias = there.log_sizes(site).masked_fill(self.zoom.seen(self.device), NEG_INF)
            entries = with_block(entries, there.mean_k, there.mean_v, there.positions, bias)
        elif score is not None and isinstance(components.router, Coarse):
            rest = components.router.attend(site, q, score, self.zoom.seen(score.device), spans)
            self.reads_codes = rest is not None
            entries = entries if rest is None else self._with_rest(entries, site, *rest)
        return entries

    def _with_rest(self, entries: Entries, site: AttentionSite, value: Tensor, mass: Tensor) -> Entries:
        """`entries` and what attention to everything else gives, value [Hq, T, Dv] of the mass that is the exponential of `mass` [Hq, T]:
        for each query an entry of its own, whose key says nothing and whose bias is all."""
        heads, tokens = mass.shape
        own, group = site.group_size * tokens, site.group_size
        value, mass = value.to(self.device), mass.to(self.device)
        v = value.view(site.kv_heads, own, -1)
        k = v.new_zeros(site.kv_heads, own, site.key_dim)
        bias = mass.new_full((heads, tokens, own), NEG_INF)
        at = torch.arange(tokens, dtype=torch.int64, device=self.device)
        place = (torch.arange(heads, dtype=torch.int64, device=self.device) % group)[:, None] * tokens + at
        bias.scatter_(2, place[..., None], mass[..., None])
        return with_block(entries, k, v, torch.zeros(1, own, dtype=torch.int32, device=self.device), bias)

    def _with_tokens(self, entries: Entries, site: AttentionSite, slots: Slots) -> Entries:
        """`entries` and the unfolded tokens; a bias where the query heads of a group read different ones."""
        if not slots.filled:
            return entries
        bias = None
        if self.zoom is not None and self.zoom.own is not None:
            units = self.spans.places.units_of(slots.places.cpu())
            bias = bias_of(zoomed_units(self.zoom.heads, units, site), self.device)
        return with_block(entries, slots.k, slots.v, slots.positions, bias)

    def _with_factors(self, entries: Entries, site: AttentionSite, factors: UnfoldedFactors) -> Entries:
        """`entries` and the unfolded spans that stay factors."""
        seen = zoomed_units(self.zoom.heads, factors.unit, site)
        length = torch.where(factors.ids >= 0, self.spans.host_factors.lengths[factors.ids.clamp(min=0)], 0)
        inside = torch.arange(factors.positions.shape[-1], dtype=torch.int64, device="cpu") < length[..., None]
        inside = inside.repeat_interleave(site.group_size, 0)[:, None]
        return entries._replace(
            **factors.parts,  # type: ignore[arg-type]
            factored_positions=factors.positions,
            factored_bias=bias_of(seen[..., None] & inside, self.device),
        )

    def _score(self, site: AttentionSite, q: Tensor, step: Step) -> None:
        """Add what the new queries q [Hq, T, D] attend to to the scores of the exact tokens, kept ones first."""
        kept, recent = self.kept.positions, self.recent.positions
        rows = max(kept.shape[0], recent.shape[0])
        positions = torch.cat([kept.expand(rows, -1), recent.expand(rows, -1)], 1)
        asked = step.tokens + torch.arange(q.shape[1], dtype=torch.int64, device=positions.device)
        k = torch.cat([plain(self.kept.k), plain(self.recent.k)], 1)
        added = self.components.evictor.added(site, q, k, positions[:, None, None] > asked[:, None])
        self.kept.scores.add_(added[:, : self.kept.length])
        self.recent.scores.add_(added[:, self.kept.length :])

    def _unfold(
        self, site: AttentionSite, q: Tensor, allowance: float, step: Step
    ) -> tuple[Zoom, UnfoldedFactors | None, Tensor]:
        """What is chosen (`semkv.runtime.decode.choosing`), of which the slots hold the tokens then, in at most `allowance` bytes; factored
        spans; and the scores."""
        spans = self.spans
        slots, allowance = self._slots(site, allowance)
        score = self.components.router.score(site, q, spans, step).float()
        there = step.kernels and score.device == q.device
        score = score if there else score.cpu()
        choose, room = choose_there if there else choose_units, allowance
        while True:
            zoom = choose(self.components, spans, site, score, room)
            factored = spans.factored_of(zoom.chosen)
            needed = 0 if factored is None else spans.unfolded_nbytes(zoom.chosen) + spans.factored_nbytes(factored)
            if needed <= allowance:
                break
            room *= 0.9 * allowance / needed  # factors of different ranks are padded to the largest
        factors = None if factored is None else spans.unfold_factors(factored, self.factors.there, self.device)
        held = self._with_slots(site, int(spans.places.tokens(zoom.chosen).max()) if slots is None else slots)
        moved, stayed = (0, 0) if spans.all_factors else held.hold(zoom.chosen, spans)
        size = spans.host_tokens.token_nbytes
        self.moved_nbytes, self.held_nbytes = (0 if self.on_device else moved * size), stayed * size
        self.factors = FactorsRead() if factors is None else FactorsRead(factors, nbytes=factors.nbytes)
        if factors is not None:
            self.moved_nbytes += factors.moved_nbytes
            self.held_nbytes += factors.held_nbytes
        return zoom, factors, score

    def _with_slots(self, site: AttentionSite, slots: int) -> Slots:
        """The slots, of which so many may be filled."""
        if self.slots is None:
            self.slots = Slots(site.kv_heads, self.spans.room_kinds, self.device)
        self.slots.allow(slots)
        return self.slots

    def _slots(self, site: AttentionSite, allowance: float) -> tuple[int | None, float]:
        """Slots that may be filled, None for as many as are needed, and the device bytes that may be filled of `allowance`."""
        if self._reserved_slots is not None:
            return self._reserved_slots
        spans, slot_nbytes = self.spans, site.kv_heads * self.spans.token_nbytes()
        if self.components.most:
            allowance = min(allowance, self.components.most * slot_nbytes)
        if spans.has_factors:
            return None, allowance
        slots = room_for(spans.host_tokens.length)
        if allowance < float("inf"):
            slots = min(within(int(allowance / slot_nbytes)), slots)
        return slots, min(allowance, slots * slot_nbytes)

    def clone(self) -> SiteMemory:
        copy = object.__new__(SiteMemory)
        copy.__dict__.update(self.__dict__)
        copy.kept, copy.recent = self.kept.clone(), self.recent.clone()
        copy.spans = self.spans.clone() if self.spans is not None else None
        copy.slots = None if self.slots is None else self.slots.clone()
        copy.factors = self.factors.clone()
        copy.there, copy._brought = StepSide(self.device), None
        return copy
