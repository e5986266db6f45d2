"""The memory of one sequence: a store per attention layer, within one budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from semkv.errors import BudgetError
from semkv.ir.memory import Entries
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.runtime.budget import Budget
from semkv.runtime.components import Components
from semkv.runtime.record import RowRecord
from semkv.runtime.segments import Segmentation
from semkv.runtime.site_memory import SiteMemory
from semkv.runtime.spans import FoldedSpans, span_cost_bytes
from semkv.runtime.token_store import TokenStore

PAGE = 8
"""Tokens in a page at which methods declare their smallest sizes."""


def in_pages(tokens: int, page_size: int) -> int:
    """`tokens`, declared for pages of 8, in pages of `page_size`: larger pages need as many of them."""
    return max(tokens, -(-tokens // PAGE) * page_size)


@dataclass(frozen=True)
class Placement:
    """What is the same for every row: the program, the method's components, the budget, and where tiers live.

    minimum_tokens: smallest budget, in tokens per KV head and layer, that the method can live in at this page size.
    """

    program: Program
    method: str
    components: Components
    budget: Budget
    minimum_tokens: int
    residency: str
    page_size: int
    disk: bool
    device: torch.device

    @cached_property
    def budgeted(self) -> tuple[AttentionSite, ...]:
        """The stores that the budget counts."""
        return tuple(store for store in self.program.stores if store.treatment == "method")


@dataclass
class Traffic:
    """What decode steps did, summed over the steps of one row.

    steps: forward calls; moved_bytes: from the host tier to the device; peak_bytes: largest device residency of budgeted
    stores; peak_share: largest residency as a share of the budget at that step; zooms: per site, spans unfolded [Hq] and
    span decisions taken.
    """

    steps: int = 0
    moved_bytes: int = 0
    peak_bytes: int = 0
    peak_share: float = 0.0
    zooms: dict[int, Tensor] = field(default_factory=dict)
    decisions: dict[int, int] = field(default_factory=dict)

    def clone(self) -> Traffic:
        copy = Traffic(**{name: getattr(self, name) for name in ("steps", "moved_bytes", "peak_bytes", "peak_share")})
        copy.zooms = {site: count.clone() for site, count in self.zooms.items()}
        copy.decisions = dict(self.decisions)
        return copy


class RowMemory:
    """Stores of one row, built from its prefill record."""

    def __init__(self, placement: Placement, record: RowRecord) -> None:
        self.placement = placement
        self.tokens = record.tokens
        self.traffic = Traffic()
        self._check_budget()
        divided: dict[tuple[float, float], Segmentation] = {}
        self.stores = {store.store: self._build(store, record, divided) for store in placement.program.stores}

    # -- budget ------------------------------------------------------------------------------------------------------

    def _check_budget(self) -> None:
        placement = self.placement
        if placement.budget.value is None:
            return
        for store in placement.budgeted:
            cap = placement.budget.cap_tokens(len(placement.budgeted), store, self.tokens)
            if cap < placement.minimum_tokens:
                share = placement.minimum_tokens / max(1, self.tokens)
                hint = f"budget={placement.minimum_tokens} (tokens per KV head and layer)"
                if share <= 1 and not isinstance(placement.budget.value, int):
                    hint += f" or a fraction of at least {share:.3g} at this length"
                raise BudgetError(
                    f"budget {placement.budget.value} leaves {cap:.1f} tokens per KV head in layer {store.name or store.index} for a "
                    f"sequence of {self.tokens} tokens; {placement.method!r} needs at least {placement.minimum_tokens}: use {hint}"
                )

    def cap_bytes(self, tokens: int) -> float:
        """Device bytes that the budgeted stores together may hold at `tokens` tokens."""
        placement = self.placement
        return (
            float("inf") if placement.budget.value is None else placement.budget.cap_bytes(placement.budgeted, tokens)
        )

    def _store_cap(self, store: AttentionSite, tokens: int) -> float:
        cap = self.placement.budget.cap_tokens(len(self.placement.budgeted), store, tokens)
        return cap * store.values_per_token * self.placement.budget.dtype.itemsize

    def fixed_allowance(self, store: AttentionSite, tokens: int) -> float:
        """Device bytes for what stays between steps in one store."""
        if store.treatment != "method" or self.placement.budget.value is None:
            return float("inf")
        cap, components = self._store_cap(store, tokens), self.placement.components
        floor = in_pages(components.floor_tokens, self.placement.page_size)
        floor *= store.values_per_token * self.placement.budget.dtype.itemsize
        return min(cap, max(components.fixed_share * cap, floor))

    def workspace_allowance(self, store: AttentionSite, tokens: int) -> float:
        """Device bytes for unfolded spans while one store's layer runs."""
        if store.treatment != "method" or self.placement.budget.value is None:
            return float("inf")
        if self.placement.residency == "elastic":
            return max(0.0, self._store_cap(store, tokens) - self.stores[store.store].fixed_nbytes)
        fixed = sum(self.stores[other.store].fixed_nbytes for other in self.placement.budgeted)
        return max(0.0, self.cap_bytes(tokens) - fixed)

    def chunk_limit(self) -> int:
        """Tokens that one step may add so that they fit beside what stays: whole pages, at least one token."""
        limit = 1 << 30
        for store in self.placement.budgeted:
            memory = self.stores[store.store]
            free = self.fixed_allowance(store, self.tokens) - memory.kept.nbytes
            if free == float("inf"):
                continue
            pages = int(free // memory.page_nbytes)
            if memory.spans is not None:
                pages = min(pages - 1, max(1, pages // 3))  # a window that is not whole pages, and the spans' summaries
            limit = min(limit, pages * self.placement.page_size)
        return max(1, limit)

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(
        self, store: AttentionSite, record: RowRecord, divided: dict[tuple[float, float], Segmentation]
    ) -> SiteMemory:
        placement, n = self.placement, record.tokens
        k, v = record.keys[store.store], record.values[store.store]
        surprisal = record.surprisal if record.surprisal is not None else torch.zeros(n)
        everything = torch.arange(n)
        components = placement.components
        if store.treatment == "window":
            return self._site(store, Components(), k, v, everything[:0], everything[-store.window :], surprisal)
        allowance = self.fixed_allowance(store, n)
        if allowance == float("inf"):
            return self._site(store, components, k, v, everything[:0], everything, surprisal)
        if components.outside == "folded" and self._fits(store, n, allowance):
            sinks = min(getattr(components.segmenter, "sinks", 0), n)
            return self._site(
                store, components, k, v, everything[:sinks], everything[sinks:], surprisal, self._spans(store)
            )
        token_bytes = store.values_per_token / store.kv_heads * placement.budget.dtype.itemsize + 4
        room = allowance / store.kv_heads / token_bytes
        if components.outside == "dropped":
            if components.keeper is None:
                raise BudgetError(f"method {placement.method!r} has no rule for what to keep")
            pages = int(room // placement.page_size) * placement.page_size
            kept, recent = components.keeper.keep(store, record, pages, placement.page_size)
            return self._site(store, components, k, v, kept, everything[recent:], surprisal)
        cost = span_cost_bytes(store, components) / token_bytes
        key = (round(room, 3), round(cost, 6))
        if key not in divided:
            divided[key] = components.segmenter.divide(surprisal, room, cost, placement.page_size)
        parts = divided[key]
        memory = self._site(
            store, components, k, v, parts.kept, everything[parts.recent :], surprisal, self._spans(store)
        )
        folded = parts.folded
        memory.spans.fold(k[:, folded], v[:, folded], folded, surprisal[folded], parts.lengths)
        return memory

    def _fits(self, store: AttentionSite, n: int, allowance: float) -> bool:
        pages = -(-n // self.placement.page_size) + 1  # sinks may take a page of their own
        tokens = pages * self.placement.page_size
        return tokens * (store.values_per_token * self.placement.budget.dtype.itemsize + 4) <= allowance

    def _spans(self, store: AttentionSite) -> FoldedSpans:
        placement = self.placement
        return FoldedSpans(store, placement.components, placement.budget.dtype, disk=placement.disk)

    def _site(
        self, store: AttentionSite, components: Components, k: Tensor, v: Tensor, kept: Tensor, recent: Tensor,
        surprisal: Tensor, spans: FoldedSpans | None = None,
    ) -> SiteMemory:  # fmt: skip
        placement = self.placement
        device, page = placement.device, placement.page_size
        kept = kept if kept.dim() == 2 else kept[None]
        per_head = kept.expand(store.kv_heads, -1)
        heads = torch.arange(store.kv_heads)[:, None]
        uncapped = store.treatment != "method" or placement.budget.value is None
        return SiteMemory(
            store, components,
            TokenStore(k[heads, per_head].to(device), v[heads, per_head].to(device), kept.to(device), page),
            TokenStore(k[:, recent].to(device), v[:, recent].to(device), recent[None].to(device), page, reserve=uncapped),
            spans, surprisal[recent].clone(), device=device, elastic=placement.residency == "elastic",
        )  # fmt: skip

    # -- steps -------------------------------------------------------------------------------------------------------

    def entries(
        self, site: AttentionSite, owner: bool, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, surprisal: Tensor
    ) -> Entries:
        """Store new tokens where `site` owns its store, and return what it attends to; tensors without a batch dimension."""
        memory = self.stores[site.store]
        store = memory.site
        tokens = self.tokens + q.shape[1]
        if owner:
            if store.treatment == "window":
                excess = memory.recent.length - (store.window - 1)
                if excess >= memory.recent.page_size:
                    memory._pop(excess)
            limit = self.cap_bytes(tokens) / 4 / store.kv_heads
            memory.append(k, v, positions, surprisal, self.fixed_allowance(store, tokens), limit)
        entries = memory.entries(site, q, self.workspace_allowance(store, tokens))
        self._account(site, memory, tokens)
        return entries

    def _account(self, site: AttentionSite, memory: SiteMemory, tokens: int) -> None:
        traffic = self.traffic
        traffic.moved_bytes += memory.moved_nbytes
        if memory.site.treatment == "method":
            resident = self.device_nbytes(running=memory)
            traffic.peak_bytes = max(traffic.peak_bytes, resident)
            traffic.peak_share = max(traffic.peak_share, resident / self.cap_bytes(tokens))
        if memory.zoomed is not None:
            count = memory.zoomed.float().sum(dim=(1, 2))
            traffic.zooms[site.index] = traffic.zooms.get(site.index, torch.zeros_like(count)) + count
            taken = memory.zoomed.shape[1] * memory.zoomed.shape[2]
            traffic.decisions[site.index] = traffic.decisions.get(site.index, 0) + taken

    def device_nbytes(self, running: SiteMemory | None = None) -> int:
        """Device bytes of budgeted stores while `running`'s layer runs; between steps where it is None."""
        memories = [self.stores[store.store] for store in self.placement.budgeted]
        fixed = sum(memory.fixed_nbytes for memory in memories)
        if self.placement.residency == "elastic":
            return fixed + sum(memory.workspace_nbytes for memory in memories)
        return fixed + (running.workspace_nbytes if running is not None else 0)

    def patch_surprisal(self, surprisal: Tensor) -> None:
        """Set the surprisal of the newest tokens, known only after their step: float32 [t]."""
        for memory in self.stores.values():
            count = min(len(surprisal), len(memory.recent_surprisal))
            if count:
                known = memory.recent_surprisal.clone()  # forks share it
                known[-count:] = surprisal[-count:]
                memory.recent_surprisal = known

    def clone(self) -> RowMemory:
        copy = object.__new__(RowMemory)
        copy.placement, copy.tokens = self.placement, self.tokens
        copy.traffic = self.traffic.clone()
        copy.stores = {store: memory.clone() for store, memory in self.stores.items()}
        return copy
