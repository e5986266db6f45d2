"""What a method takes of any row's budget: the floor that serves rows of every length, and budgets that can never serve."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from semkv.errors import BudgetError
from semkv.ir.site import AttentionSite
from semkv.profiles.schema.memory import UNBOUNDED
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.budgets.costs import exact_nbytes, unit_cost_bytes
from semkv.runtime.components import Components, Part, Plan
from semkv.runtime.placement import in_pages

MARGIN = 1.01
"""What is asked for beyond the least that a method can live in: bytes are whole, and shares are raised and lowered a little."""


@dataclass(frozen=True)
class SharingPart:
    """KV heads of a store that share the budget. share: of an even share per head, what they have where that is enough for the method."""

    site: AttentionSite
    components: Components
    share: float


@dataclass(frozen=True)
class Demand:
    """What a method takes of the budget of a row of n tokens, in tokens per KV head and layer at full resolution.

    method: its name. minimum: the smallest budget of a part. least: that of a row, so that each of its parts has as much. whole: for
    each token, by heads that keep every token. index: for each token, by charged notes, and `index_share` of the budget at most.
    longest: tokens of the longest row. parts: those that share what the rest leaves. less: the option with which the method keeps less.
    """

    method: str
    minimum: int
    least: float
    whole: float
    index: float
    index_share: float
    longest: int
    parts: tuple[SharingPart, ...] = ()
    less: str = ""

    @classmethod
    def of(
        cls,
        method: str,
        stores: tuple[AttentionSite, ...],
        plan: Plan,
        budget: Budget,
        minimum: int,
        longest: int | None,
        less: str = "",
    ) -> Demand:
        """Of `plan` for the counted `stores`; `minimum` is in tokens of whole pages."""
        full = max(1, sum(budget.full_bytes(store, 1) for store in stores))
        whole, sharing = 0, []
        for store in stores:
            for part in plan.parts[store.store]:
                site = part.site(store)
                if part.components.whole:
                    whole += budget.held_bytes(site, 1) - budget.held_bytes(site, 0)
                else:
                    share = _smallest_share(store, part, stores, plan)
                    sharing.append(SharingPart(site, part.components, share))
        least = MARGIN * minimum
        if whole:
            least *= sum(budget.full_bytes(part.site, 1) for part in sharing) / full
            least += budget.page_size * whole / full
        index, share = plan.charge.token_nbytes / full, plan.charge.share
        rows = UNBOUNDED if longest is None else longest
        return cls(method, minimum, least, whole / full, index, share, rows, tuple(sharing), less)

    def served(self, cap: float, tokens: int | float) -> bool:
        """Whether a cap of so many tokens per KV head serves a row of `tokens` tokens."""
        return cap - min(self.index * tokens, self.index_share * cap) - self.whole * tokens >= self.least

    @property
    def smallest_fraction(self) -> float:
        """The smallest fraction that serves the longest row by itself."""
        fixed = self.whole + self.least / self.longest
        bounded = fixed / (1 - self.index_share) if self.index_share < 1 else float("inf")
        return math.ceil(1e3 * min(fixed + self.index, bounded)) / 1e3

    @property
    def smallest_tokens(self) -> int:
        """The smallest number of tokens that serves every row."""
        bounded = self.least / (1 - self.index_share) if self.index_share < 1 else float("inf")
        return math.ceil(min(self.least + self.index * self.longest, bounded) / MARGIN - 1e-9)


def _smallest_share(store: AttentionSite, part: Part, stores: tuple[AttentionSite, ...], plan: Plan) -> float:
    """Of an even share per KV head, what a part of `store` has before parts below the smallest budget are raised to it."""
    if len(plan.parts[store.store]) == 1 or plan.keeps_whole_heads:
        return 1.0
    mean = sum(s.budget_share * s.values_per_token for s in stores) / sum(s.values_per_token for s in stores)
    return min(1.0, store.budget_share / mean) * part.share * store.kv_heads / (part.last - part.first)


def with_floor(budget: Budget, demand: Demand, floor: int) -> Budget:
    """`budget` with the floor that is in force: `floor` tokens per KV head in whole pages, or what the method needs so that no length is
    refused, where that is more; no floor where `floor` is 0.

    Raises
    ------
    BudgetError: the budget can never serve the method; names the smallest that can.
    """
    if budget.value is None or budget.keeps_all:
        return budget
    if isinstance(budget.value, int):
        _check_tokens(budget.value, demand)
        return budget
    if not floor:
        return budget
    value, tokens = budget.value, _whole_pages(max(floor, math.ceil(demand.least)), budget)
    crossing = min(tokens / value, demand.longest)
    if not (demand.served(tokens, crossing) and demand.served(max(tokens, value * demand.longest), demand.longest)):
        slope = value - min(demand.index, demand.index_share * value) - demand.whole
        if slope <= 0 or demand.least / slope > demand.longest:
            _refuse(value, demand)
        tokens = _whole_pages(math.ceil(value * demand.least / slope), budget)
    while tokens < demand.longest and not all(_reaches(part, budget, tokens, demand) for part in demand.parts):
        tokens += budget.page_size
    return replace(budget, floor=tokens)


def _whole_pages(tokens: int, budget: Budget) -> int:
    return -(-tokens // budget.page_size) * budget.page_size


def _reaches(part: SharingPart, budget: Budget, floor: int, demand: Demand) -> bool:
    """Whether folded units of the longest row that the floor serves fit into what it leaves to unfold them: where the index of many units
    does not fit, units grow."""
    components, site, own = part.components, part.site, max(part.share * floor, demand.minimum)
    seen = components.summary is not None and components.summary.attend
    if seen or components.segmenter is None or components.router is None or not components.unfold:
        return True
    if getattr(components.segmenter, "fixed", False):  # units do not grow: the oldest tokens are left out
        return True
    page = budget.page_size
    room = min(own, max(components.fixed_share * own, in_pages(components.floor_tokens, page)))
    window = max(page, min(components.window, components.window_share * room))
    sinks = _whole_pages(getattr(components.segmenter, "sinks", 0), budget)
    token = exact_nbytes(site, components, budget.dtype) + 4
    left, cost = room - window - components.fold_chunk - sinks, unit_cost_bytes(site, components, budget.dtype) / token
    if left <= 0:
        return False
    tokens, unit = min(floor / budget.value, demand.longest), components.unit
    while cost and tokens / unit > left / cost:
        unit *= 2
    return unit <= own - room


def _check_tokens(value: int, demand: Demand) -> None:
    if demand.whole:
        raise BudgetError(
            f"budget {value} is a number of tokens, but {demand.method!r} keeps every token of some heads: "
            "give a fraction of the full KV"
        )
    if demand.index and demand.index_share >= 1:
        raise BudgetError(
            f"budget {value} is a number of tokens, but the retrieval head of {demand.method!r} holds a key of every token: give a "
            "fraction of the full KV, or strict=True, which keeps the newest tokens' keys in few bits"
        )
    if value < demand.smallest_tokens:
        raise BudgetError(
            f"budget {value} can never serve: {demand.method!r} needs at least {demand.minimum} tokens per KV head in every layer: use "
            f"budget={demand.smallest_tokens} (tokens per KV head and layer), or a fraction, whose floor short rows have"
        )


def _refuse(value: float, demand: Demand) -> None:
    share = demand.smallest_fraction
    hint = f"use a fraction of at least {share:g}" if share <= 1 else "use 1.0, which keeps every token"
    less = f", or {demand.less}, with which it keeps less" if demand.less else ""
    raise BudgetError(
        f"budget {value} can never serve: of every token {demand.method!r} keeps {min(1.0, demand.whole + demand.index):.1%} of the KV on "
        f"the device, and it needs {demand.minimum} tokens per KV head beside that: {hint}{less}"
    )
