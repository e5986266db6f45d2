"""The memory of one sequence: a store per attention layer, its KV heads in parts, within one budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from semkv.errors import BudgetError
from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite
from semkv.kernels.mixed_attention.call import DTYPES
from semkv.profiles.schema.memory import UNBOUNDED, offloaded_stores
from semkv.runtime.budgets.budget import bounded_shares
from semkv.runtime.budgets.costs import exact_nbytes_of, unit_cost_bytes
from semkv.runtime.budgets.page_shares import exact_token_nbytes, shares_in_pages
from semkv.runtime.budgets.part_shares import part_shares, whole_nbytes
from semkv.runtime.components import Evictor, Part
from semkv.runtime.decode.join import join_parts
from semkv.runtime.decode.traffic import Traffic
from semkv.runtime.placement import Placement, in_pages
from semkv.runtime.prompt.part import PromptPart
from semkv.runtime.prompt.past import Past
from semkv.runtime.prompt.record import RowRecord, copied
from semkv.runtime.step import CHOSEN, Step
from semkv.runtime.store.roomy import SHARE
from semkv.runtime.store.segments import Boundary, Cut, Folding, Segmentation
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.spans import FoldedSpans
from semkv.runtime.store.tables import Tables
from semkv.runtime.store.token_store import TokenStore
from semkv.runtime.text import Once, Text

FOLD_BLOCK, FOLD_BLOCKS = 1024, 16
"""A prompt is folded in at most `FOLD_BLOCKS` blocks of at least `FOLD_BLOCK` tokens: what is computed of one is freed before the next."""


class RowMemory:
    """Stores of one row, built from its prefill record; with `release` the record lets go of each store that is built, where no
    other one is made of it.

    text: the tokens that it has read; prompt: how many it was built from. stores: per KV store the memories of its parts, in the order of
    their heads. shares: per budgeted store, its part of the row's budget in bytes. notes: what components remember between steps.
    recurrent: of each recurrent site its states [1, ...], which steps write in place. turned: see `semkv.runtime.prompt.content`.
    chosen: of each site that chooses tokens, the places [T, n] of this step.
    stepping: a step has begun and not ended, so that layers may differ in what they hold. exact: the row holds every token, whatever the
    method; past: what the method will need when the row outgrows the budget's floor, None where it cannot.
    """

    stepping = exact = False
    past: Past | None = None
    chosen: dict[int, Tensor]

    def __init__(self, placement: Placement, record: RowRecord, *, release: bool = False) -> None:
        """Of a prompt; where the budget holds it whole, every token of it is exact, whatever the method."""
        if placement.budget.exact(record.tokens):
            self.exact = True
            self.past = Past.of(placement, record) if placement.outgrown else None
            placement = placement.whole
        self._make(placement, record, {}, release)

    def _make(
        self, placement: Placement, record: RowRecord, stores: Mapping[int, tuple[SiteMemory, ...]], release: bool
    ) -> None:
        """Make the memories of a prompt but for those of `stores`, which there are."""
        self.placement = placement
        self.tokens = self.prompt = record.tokens
        self.text = Text(record.ids, record.surprisal)
        self.check_length(self.tokens)
        self.turned = record.turned
        self.traffic = Traffic()
        self.notes: dict[str, Tensor] = {}
        self.recurrent = copied(record.recurrent)
        self.passing: dict[str, object] = {}
        self._staying: dict[int, int] = {}
        there = record.on(placement.device)  # what is kept of a prompt is computed where the prompt was
        if placement.plan.after_prompt is not None:
            placement.plan.after_prompt.read(there, self.notes, placement.cap_of_all)
        self.shares = self._shares(there)
        self.part_shares = part_shares(placement, self.shares, self.tokens, self.cap_bytes(self.tokens))
        self._check_budget()
        self.shares = shares_in_pages(placement, self.shares, self.cap_bytes(self.tokens))
        shared = Once()
        self.stores: dict[int, tuple[SiteMemory, ...]] = dict(stores)
        for number, store in placement.stores.items():
            if number in stores:
                continue
            parts = placement.parts(store)
            self.stores[number] = tuple(self._build(store, part, record, there, shared) for part in parts)
            if release and not placement.plan.reads_others:
                record.release(number)
        if not self.is_short:  # the floor is such that they reach
            self._check_reach()

    def outgrow(self, more: int) -> None:
        """The method takes over a row that `more` tokens take beyond the budget's floor, as if its text so far were a prompt. Either that,
        or the row is as it was."""
        if self.past is None or self.placement.budget.exact(self.tokens + more):
            return
        others = {number: own for number, own in self.stores.items() if own[0].site.treatment != "method"}
        grown = object.__new__(RowMemory)
        grown._make(self.past.placement, self.past.record(self.text, self.stores), others, release=True)
        grown.traffic, grown.recurrent, grown.turned = self.traffic, self.recurrent, self.turned
        self.__dict__ = grown.__dict__

    @property
    def exact_tokens(self) -> int:
        """Tokens that may follow before the method takes over; 0 where it has."""
        if not self.exact:
            return 0
        return UNBOUNDED if self.past is None else self.placement.budget.floor - self.tokens

    # -- budget ------------------------------------------------------------------------------------------------------

    def check_length(self, tokens: int) -> None:
        """Raise `BudgetError` for a sequence that the device cannot hold with every layer on the host."""
        if self.placement.thresholds:
            offloaded_stores(self.placement.thresholds, tokens)

    def _shares(self, record: RowRecord) -> dict[int, float]:
        stores, _ = self.placement.division
        if not stores:
            return {}
        shares = [store.budget_share for store in stores]
        if self.placement.budget.value is not None:
            budget = self.placement.budget.average_tokens(self.tokens)
            if self.placement.plan.allocator is not None:
                shares = list(self.placement.plan.allocator.shares(stores, record, budget))
            if not self.placement.plan.keeps_whole_heads:
                shares = bounded_shares(stores, shares, budget, self.placement.minimum_tokens, self.tokens)
        weights = [share * store.values_per_token for share, store in zip(shares, stores)]
        return {store.store: weight / sum(weights) for store, weight in zip(stores, weights)}

    def _check_budget(self) -> None:
        placement = self.placement
        if placement.budget.value is None:
            return
        for store in placement.budgeted:
            for part in placement.parts(store):
                if part.components.whole:
                    continue
                site = part.site(store, part.share)
                cap = self._part_cap(store, part, self.tokens) / self._token_nbytes(site)
                if cap < placement.minimum_tokens:
                    self._refuse(store, cap)

    def _check_reach(self) -> None:
        """Raise `BudgetError` where the prompt's folded tokens are seen only when they unfold, and most of them cannot: their units do
        not fit."""
        folded, fitting, failing = 0, 0, []
        for store in self.placement.budgeted:
            for memory, room in zip(self.stores[store.store], self.workspace_allowance(store, self.tokens)):
                seen = memory.components.summary is not None and memory.components.summary.attend
                if not memory.unfolds or seen or memory.spans is None:
                    continue
                lengths, free = memory.spans.lengths, memory.unfolded_tokens(room) / memory.site.kv_heads
                fits = lengths <= free
                heads = memory.site.kv_heads // len(lengths)  # that each row of lengths stands for
                folded += heads * int(lengths.sum())
                fitting += heads * int(lengths[fits].sum())
                if not bool(fits.all()):
                    failing.append((free, float(lengths[~fits].float().mean())))
        among = next((store.among for store in self.placement.budgeted), None)
        if among is not None:  # all processes refuse a row, or none
            folded, fitting = among.counts(folded, fitting)
        if 2 * fitting < folded:
            free, length = min(failing, default=(0.0, 0.0))
            raise BudgetError(
                f"budget {self.placement.budget.value} is too small for {self.placement.method!r} in a sequence of {self.tokens} tokens: "
                f"it leaves {free:.0f} tokens per KV head to unfold units of {length:.0f} tokens on the mean, of which there are so few "
                "because the index of more does not fit either: raise the budget"
            )

    def _refuse(self, store: AttentionSite, cap: float) -> NoReturn:
        placement, smallest = self.placement, self.placement.minimum_tokens
        if self.charged_nbytes:
            self._refuse_charged()
        if not isinstance(placement.budget.value, int) and cap > 0:
            smallest = math.ceil(smallest * placement.budget.value * self.tokens / cap - 1e-6)
        share = smallest / max(1, self.tokens)
        hint = f"budget={smallest} (tokens per KV head and layer)"
        if share <= 1 and not isinstance(placement.budget.value, int):
            hint += f" or a fraction of at least {share:.3g} at this length"
        raise BudgetError(
            f"budget {placement.budget.value} leaves {cap:.1f} tokens per KV head in layer {store.name or store.index} for a "
            f"sequence of {self.tokens} tokens; {placement.method!r} needs at least {placement.minimum_tokens}: use {hint}"
        )

    def _token_nbytes(self, site: AttentionSite) -> int:
        """Bytes of one token in all heads of `site`, at full resolution."""
        return site.values_per_token * self.placement.budget.dtype.itemsize

    def _refuse_charged(self) -> NoReturn:
        """The budget that what the method itself keeps, and the least that it can live in, would fit."""
        placement = self.placement
        full = sum(placement.budget.full_bytes(store, self.tokens) for store in placement.budgeted)
        least = placement.minimum_tokens / self.tokens + self.charged_nbytes / full
        share = math.ceil(1e3 * (1.003 * least)) / 1e3
        hint = (
            f"use a fraction of at least {share:g} at this length"
            if share <= 1
            else "no budget is enough at this length"
        )
        raise BudgetError(
            f"budget {placement.budget.value} is too small for {placement.method!r}, whose own index of {self.tokens} tokens takes "
            f"{self.charged_nbytes / full:.1%} of the KV and which needs {placement.minimum_tokens} tokens per KV head beside it: "
            f"{hint}, or a mode of the method whose index is smaller"
        )

    def whole_cap(self, tokens: int) -> float:
        """Device bytes of the row's budget at `tokens` tokens; of all processes' heads where these divide it together (`Plan.together`)."""
        return self.placement.row_cap(tokens)

    def cap_bytes(self, tokens: int) -> float:
        """Device bytes that the budgeted stores together may hold at `tokens` tokens: what charged notes leave."""
        return self.whole_cap(tokens) - self._charged(1.0 if self.placement.plan.together else None)

    @property
    def charged_nbytes(self) -> int:
        """Device bytes of the notes that the budget counts."""
        return self._charged()

    def _charged(self, counted: float | None = None) -> int:
        """Of what the charged notes of all processes take, the part that is `counted`; None: that of this process."""
        plan = self.placement.plan
        if not plan.charged:
            return 0
        held = sum(self.notes[name].nbytes for name in plan.charged if name in self.notes)
        part = (plan.charge.counted if counted is None else counted) / plan.charge.here
        return held if part == 1 else round(held * part)

    @property
    def is_short(self) -> bool:
        """Whether the cap is the budget's floor."""
        return self.tokens < self.placement.budget.in_force_from

    @property
    def above_fraction_nbytes(self) -> int:
        """Device bytes that the row holds above the fraction of its length, because of the budget's floor."""
        if not self.is_short:
            return 0
        held = self.device_nbytes() + self.charged_nbytes - self.excess_nbytes
        return max(0, held - self.placement.budget.strict_bytes(self.placement.budgeted, self.tokens))

    @property
    def excess_nbytes(self) -> int:
        """Device bytes that its stores hold beyond their caps: tokens that follow a prompt, where those stay."""
        own = [(store, self.stores[store.store]) for store in self.placement.budgeted]
        held = [sum(memory.device_nbytes for memory in memories) for _, memories in own]
        return sum(_beyond(x, self._store_cap(*each, self.tokens)) for x, each in zip(held, own))

    def _counted(self, tokens: int) -> int:
        """The tokens by which caps go when the row has `tokens`: those of the prompt where what follows it is beside them."""
        return min(tokens, self.prompt) if self.placement.plan.keeps_generated else tokens

    def _part_cap(self, store: AttentionSite, part: Part, tokens: int) -> float:
        if part.components.whole:
            return float("inf")
        if self.part_shares:
            left = self.cap_bytes(tokens) - whole_nbytes(self.placement, tokens)
            return left * self.part_shares[store.store, part.first]
        return self.cap_bytes(tokens) * self.shares[store.store] * part.share

    def _store_cap(self, store: AttentionSite, memories: tuple[SiteMemory, ...], tokens: int) -> float:
        """Device bytes that one store may hold; heads that keep every token may hold what they do."""
        if self.placement.budget.value is None:
            return float("inf")
        if self.exact:
            return self.placement.budget.cap_bytes((store,), tokens)
        caps = (self._part_cap(store, part, tokens) for part in self.placement.parts(store))
        return sum(memory.device_nbytes if cap == float("inf") else cap for cap, memory in zip(caps, memories))

    def fixed_allowance(self, store: AttentionSite, part: Part, tokens: int) -> float:
        """Device bytes for what stays between steps in one part of a store."""
        if store.treatment != "method" or self.placement.budget.value is None:
            return float("inf")
        cap, components = self._part_cap(store, part, tokens), part.components
        floor = in_pages(components.floor_tokens, self.placement.page_size)
        return min(cap, max(components.fixed_share * cap, floor * self._token_nbytes(part.site(store))))

    def _step_allowance(self, store: AttentionSite, part: Part, tokens: int) -> float:
        """`fixed_allowance` for what a step adds to a row; no limit where it stays beside the budget."""
        return float("inf") if self.placement.plan.keeps_generated else self.fixed_allowance(store, part, tokens)

    def workspace_allowance(self, store: AttentionSite, tokens: int) -> list[float]:
        """Device bytes for unfolded units of one store, per part of it."""
        parts, memories = self.placement.parts(store), self.stores[store.store]
        if store.treatment != "method" or self.placement.budget.value is None:
            return [float("inf")] * len(parts)
        keeps, counted = self.placement.plan.keeps_generated, self._counted(tokens)
        held = [memory.fixed_nbytes - (memory.followed_nbytes if keeps else 0) for memory in memories]
        return [max(0.0, self._part_cap(store, part, counted) - own) for part, own in zip(parts, held)]

    def chunk_limit(self) -> int:
        """Tokens that one step may add so that they fit beside what stays: whole pages, at least one token."""
        limit = 1 << 30
        for store in self.placement.budgeted:
            for part, memory in zip(self.placement.parts(store), self.stores[store.store]):
                free = self._step_allowance(store, part, self.tokens) - memory.kept.nbytes
                if free == float("inf"):
                    continue
                pages = int(free // memory.page_nbytes)
                if memory.components.evictor is not None:
                    pages = min(pages, memory.room(free + memory.kept.nbytes)[1])
                if memory.spans is not None:
                    pages = min(pages - 1, max(1, pages // 3))  # a window that is not whole pages, and units' summaries
                limit = min(limit, pages * self.placement.page_size)
        ranks = self.placement.program.ranks
        if ranks is not None:  # processes that share the model run the same steps
            limit = int(ranks.reduce(torch.tensor([limit], dtype=torch.int64, device="cpu"), "min"))
        return max(1, limit)

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(self, store: AttentionSite, part: Part, record: RowRecord, there: RowRecord, shared: Once) -> SiteMemory:
        """The memory of a part of a store. there: the record where what is kept of it is computed."""
        placement, n, components = self.placement, record.tokens, part.components
        page, dtype = placement.page_size, placement.budget.dtype
        site = part.site(store, part.share)
        heads = slice(part.first, part.last)
        made = PromptPart(site, components, record, record.keys[store.store][heads], record.values[store.store][heads])
        if store.treatment == "window":
            return self._site(made, made.everything[:0], made.everything[-store.window :])
        allowance = self.fixed_allowance(store, part, n)
        if allowance == float("inf"):
            return self._site(made, made.everything[:0], made.everything)
        if components.outside == "folded" and exact_nbytes_of(site, components, n, page, dtype) <= allowance:
            sinks, cutting = min(getattr(components.segmenter, "sinks", 0), n), components.cutting
            boundary = None if cutting is None else cutting.natural(made.surprisal)
            return self._site(
                made,
                made.everything[:sinks],
                made.everything[sinks:],
                self._spans(made, shared.of(Tables, Tables.empty)),
                boundary=boundary,
            )
        token_bytes = exact_token_nbytes(site, components, placement.budget.dtype)
        room = allowance / site.kv_heads / token_bytes
        if components.outside == "dropped":
            pages = int(room // placement.page_size) * placement.page_size
            if components.evictor is not None:
                return self._scored(made, components.evictor, components.evictor.scores(site, there), pages)
            if components.keeper is None:
                raise BudgetError(f"method {placement.method!r} has no rule for what to keep")
            kept, recent = components.keeper.keep(site, there, pages, placement.page_size)
            return self._site(made, kept, made.everything[recent:])
        if components.segmenter is None:
            raise BudgetError(f"method {placement.method!r} has no rule for what to fold")
        cost = unit_cost_bytes(site, components, placement.budget.dtype) / token_bytes
        segmenter = components.segmenter
        own = (id(segmenter), store.store, part.first) if segmenter.per_store else (segmenter,)
        divided_by = (*own, round(room, 3), round(cost, 6))
        parts = shared.of(divided_by, lambda: segmenter.segment(there, site, room, cost, placement.page_size))
        spans = self._spans(made, shared.of(Tables, Tables.empty))
        memory = self._site(made, parts.kept, made.everything[parts.recent :], spans, boundary=parts.boundary)
        spans.host_tokens.expect(int(parts.lengths.sum()))
        k, v = there.keys[store.store][heads], there.values[store.store][heads]
        for cut in shared.of(parts, lambda: cuts_of(parts, made.surprisal, record.ids)):
            at = cut.on(k.device).positions
            spans.fold(Folding(k[:, at], v[:, at], cut, there), shared)
        return memory

    def _scored(self, made: PromptPart, evictor: Evictor, scores: Tensor, room: int) -> SiteMemory:
        """`room` exact tokens per KV head: the highest-scored, and the newest."""
        n = made.record.tokens
        places = evictor.places(room, self.placement.page_size)
        recent = max(0, n - (room - places)) if n > room else 0
        kept = scores[:, :recent].topk(min(places, recent)).indices.sort().values
        return self._site(made, kept, made.everything[recent:], scores=scores)

    def _spans(self, made: PromptPart, tables: Tables) -> FoldedSpans:
        placement = self.placement
        device = placement.where(made.site, made.record.tokens)
        dtype, tier = placement.budget.dtype, placement.tier
        return FoldedSpans(made.site, made.components, dtype, tier=tier, device=device, tables=tables)

    def _site(
        self,
        made: PromptPart,
        kept: Tensor,
        recent: Tensor,
        spans: FoldedSpans | None = None,
        scores: Tensor | None = None,
        boundary: Boundary | None = None,
    ) -> SiteMemory:
        placement, site, k, v = self.placement, made.site, made.k, made.v
        device, page = placement.device, placement.page_size
        alike = kept.dim() == 1 or getattr(made.components.keeper, "alike", False)
        kept = kept if kept.dim() == 2 else kept[None]
        per_head = kept.expand(site.kv_heads, -1)
        heads = torch.arange(site.kv_heads, dtype=torch.int64, device="cpu")[:, None]
        scored = [None, None] if scores is None else [scores[heads, per_head].to(device), scores[:, recent].to(device)]
        return SiteMemory(
            site,
            made.components,
            TokenStore(
                made.held(k[heads, per_head], device, kept=True),
                made.held(v[heads, per_head], device, kept=True),
                kept.to(device),
                page,
                scores=scored[0],
                once=site.once if alike else 1,
            ),
            TokenStore(
                made.held(made.newest(k, len(recent), device), device),
                made.held(made.newest(v, len(recent), device), device),
                recent[None].to(device),
                page,
                reserve=placement.uncapped(site),
                scores=scored[1],
                once=site.once,
            ),
            spans,
            unit_state=made.unit_state(recent),
            of_prompt=len(recent),
            boundary=boundary,
            device=device,
        )

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, ids: Tensor) -> None:
        """Tokens ids [T] are about to run through all layers."""
        self.stepping = True
        self.passing, self.chosen, self._staying = {}, {}, {}
        self._offload(self.tokens + len(ids))
        if self.placement.plan.before is not None:
            self.placement.plan.before.begin(ids, self.tokens, self.notes, self.passing, self.placement.cap_of_all)

    def observe(self, site: int, hidden: Tensor) -> None:
        """Keep the hidden states [T, H] that enter a site's layer, where the method reads them in the next step."""
        if self.past is not None:
            self.past.observe(site, hidden)
        if site in self.placement.plan.features:
            self.notes[f"features.{site}"] = hidden.to("cpu", copy=True)

    def _offload(self, tokens: int) -> None:
        """Move the layers whose threshold lies below `tokens` tokens to the host (SpeContext Alg. 2)."""
        for memory in self.budgeted():
            if self.placement.where(memory.site, tokens) is None:
                self.traffic.offloaded_bytes += memory.to_host()

    def entries(
        self,
        site: AttentionSite,
        owner: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        ids: Tensor,
    ) -> Entries:
        """Store new tokens where `site` owns its store, and return what it attends to; tensors without a batch dimension."""
        store, memories = self.placement.stores[site.store], self.stores[site.store]
        parts, tokens = self.placement.parts(store), self.tokens + q.shape[1]
        if owner:
            for part, memory, (allowance, limit) in zip(parts, memories, self._making_room(store, tokens)):
                heads = slice(part.first, part.last)
                memory.append(k[heads], v[heads], positions, self.text, allowance, limit)
        if self.past is not None:
            self.past.asked(site, q)
        step = self.step_of(site, ids, q)
        if site.chooser >= 0:
            step.passing[CHOSEN] = self.chosen[site.chooser]
        if site.index in self.placement.plan.at_site:
            self.placement.plan.at_site[site.index].stored(step)
        sites = [part.site(site) for part in parts]
        made = [
            memory.entries(own, q[own.query_heads] if len(parts) > 1 else q, room, step)
            for own, memory, room in zip(sites, memories, self.workspace_allowance(store, tokens))
        ]
        self.account(site, store, memories, tokens)
        return join_parts(made, sites, q.shape[1])

    def _making_room(self, store: AttentionSite, tokens: int) -> Iterator[tuple[float, float]]:
        """Before new tokens enter a store, per part: device bytes for fixed parts, and for a span in the slots that they leave a head."""
        for part, memory in zip(self.placement.parts(store), self.stores[store.store]):
            if store.treatment == "window":
                memory.slide(store.window)
            allowance, limit = self._step_allowance(store, part, tokens), float(UNBOUNDED)
            if memory.unfolds and allowance < float("inf"):
                limit = (self._part_cap(store, part, tokens) - allowance) * (1 - 1 / SHARE) / (part.last - part.first)
            yield allowance, limit

    def fold_ahead(self) -> None:
        """Make room for a token where what is folded may become factors, so that `SiteMemory.graphed` says how this step can be run."""
        for store in self.placement.program.stores:
            if any(memory.components.forms is not None for memory in self.stores[store.store]):
                for memory, room in zip(self.stores[store.store], self._making_room(store, self.tokens + 1)):
                    memory.fold_ahead(self.text, *room)

    def admit(self, store: AttentionSite) -> list[int]:
        """Make room in a store for a token that a step's graph writes; its place, per part."""
        made = zip(self.stores[store.store], self._making_room(store, self.tokens + 1))
        return [memory.admit(self.text, *room) for memory, room in made]

    def reserve(self, tokens: int) -> None:
        """See `State.reserve`; where it raises `BudgetError`, the row is used up."""
        self.outgrow(tokens)
        self._offload(self.tokens + tokens)
        plan, budget = self.placement.plan, self.cap_bytes(self.tokens)
        ahead = tokens * self.placement.division[1].charge.token_nbytes
        for store in self.placement.program.stores:
            capped = (
                store.treatment == "method" and self.placement.budget.value is not None and not plan.keeps_generated
            )
            rooms = self._making_room(store, self.tokens)
            for part, memory, (allowance, limit) in zip(self.placement.parts(store), self.stores[store.store], rooms):
                cap = self._part_cap(store, part, self.tokens) if capped else float("inf")
                memory.reserve(tokens, self.text, allowance, limit, cap * (1 - ahead / budget) if ahead else cap)

    def step_of(self, site: AttentionSite, ids: Tensor, q: Tensor) -> Step:
        """The turn of `site` in a step over ids [T], with all of its queries [Hq, T, D]."""
        store, tokens = self.placement.stores[site.store], self.tokens + len(ids)
        parts = self.placement.parts(store) if store.treatment == "method" else ()
        caps = tuple(self._part_cap(store, part, self._counted(tokens)) for part in parts)
        kernels = self.placement.kernels and q.dtype in DTYPES
        return Step(ids, self.tokens, site, q, self.stores[site.store], caps, self.notes, self.passing, kernels)

    def account(self, site: AttentionSite, store: AttentionSite, memories: tuple[SiteMemory, ...], tokens: int) -> None:
        """Count the turn of a site in a step after which the row has `tokens` tokens."""
        traffic, held, attended, cap = self.traffic, 0, 0, float("inf")
        for memory in memories:
            traffic.moved_bytes += memory.moved_nbytes
            traffic.held_bytes += memory.held_nbytes
            held, attended = held + memory.device_nbytes, attended + memory.attended_nbytes
        if store.treatment == "method":
            resident = self._device_nbytes(store, held) + self.charged_nbytes
            traffic.peak_bytes = max(traffic.peak_bytes, resident)
            cap = self._store_cap(store, memories, tokens)
            traffic.peak_share = max(traffic.peak_share, resident / self.whole_cap(tokens), held / cap)
        if store.treatment == "method" or (not self.placement.budgeted and store.treatment != "window"):
            charged = self.charged_nbytes * self.shares.get(store.store, 0.0)
            traffic.turn(held + charged, attended, _beyond(held, cap), self.placement.budget.full_bytes(store, tokens))
        for part, memory in zip(self.placement.parts(store), memories):
            counts = memory.counts
            if counts is not None:
                traffic.zoomed(site, part.first * site.group_size, *counts)

    def device_nbytes(self) -> int:
        """Device bytes of budgeted stores."""
        return sum(memory.device_nbytes for memory in self.budgeted())

    def _device_nbytes(self, store: AttentionSite, held: int) -> int:
        """`device_nbytes` in the turn of `store`, which holds `held`: in a step the others change in their own turns only. -1: of all."""
        if not self._staying:
            sizes = {s.store: sum(x.device_nbytes for x in self.stores[s.store]) for s in self.placement.budgeted}
            self._staying = {**sizes, -1: sum(sizes.values())}
        self._staying[-1] += held - self._staying[store.store]
        self._staying[store.store] = held
        return self._staying[-1]

    def memories(self) -> Iterator[SiteMemory]:
        """The memories of all parts of all stores."""
        for parts in self.stores.values():
            yield from parts

    def budgeted(self) -> Iterator[SiteMemory]:
        """The memories that the budget counts."""
        for store in self.placement.budgeted:
            yield from self.stores[store.store]

    def boundaries(self) -> Iterator[Boundary]:
        """From which surprisal on tokens bound units, of the memories in which it does."""
        yield from (memory.boundary for memory in self.memories() if memory.boundary is not None)

    def clone(self) -> RowMemory:
        copy = object.__new__(RowMemory)
        copy.placement, copy.tokens, copy.prompt, copy.shares = self.placement, self.tokens, self.prompt, self.shares
        copy.text = self.text.clone()
        copy.part_shares = self.part_shares
        copy.exact, copy.turned = self.exact, self.turned
        copy.past = None if self.past is None else self.past.clone()
        copy.traffic, copy.notes, copy.passing, copy._staying = self.traffic.clone(), dict(self.notes), {}, {}
        copy.recurrent = copied(self.recurrent)
        copy.stores = {store: tuple(memory.clone() for memory in parts) for store, parts in self.stores.items()}
        return copy


def cuts_of(parts: Segmentation, surprisal: Tensor, ids: Tensor) -> list[Cut]:
    """The blocks in which a prompt, of which surprisal [n] and ids [n] are, is folded."""
    found = []
    for block in parts.blocks(max(FOLD_BLOCK, -(-len(ids) // FOLD_BLOCKS))):
        at = block.folded
        found.append(Cut(at, surprisal[at], block.lengths, block.units, ids[at]))
    return found


def _beyond(held: int, cap: float) -> int:
    """Of `held` bytes, those beyond `cap`."""
    return math.ceil(max(0.0, held - cap))
