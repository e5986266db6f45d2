"""What is the same for every row of a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from semkv.errors import BudgetError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.profiles.schema.memory import UNBOUNDED
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.components import Components, Part, Plan
from semkv.runtime.host.tier import HostTier
from semkv.runtime.weights import Weights

PAGE = 8
"""Tokens in a page at which methods declare their smallest sizes."""


def in_pages(tokens: int, page_size: int) -> int:
    """`tokens`, declared for pages of 8, in pages of `page_size`: larger pages need as many of them."""
    return max(tokens, -(-tokens // PAGE) * page_size)


class Steps(Protocol):
    """Decode steps as graphs, see `semkv.runtime.decode.row_turns.GraphedSteps`; rows: each a `RowMemory`."""

    def serves(self, rows: Sequence[Any]) -> bool: ...

    def reasons(self) -> list[str]: ...

    def step(
        self,
        rows: Sequence[Any],
        ids: Tensor,
        positions: Tensor,
        known: Tensor,
        failures: dict[int, Exception] | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Placement:
    """What is the same for every row: the program, the method's plan, the budget, and where tiers live.

    minimum_tokens: smallest budget, in tokens per KV head and layer, that the method can live in at this page size.
    thresholds: where layers leave the device progressively, the lengths of Alg. 1 (`semkv.profiles.schema.memory`), which the
        sites' `host_from` follow from. rows: sequences that these are for; None: any number.
    kernels: whether Triton's kernels score and select units where there are some, see `semkv.kernels.mixed_attention.dispatch`.
    weights: those of the model at that time, where it may change. steps: runs single tokens as graphs; None where the method, or the
    device, has none.
    """

    program: Program
    method: str
    plan: Plan
    budget: Budget
    minimum_tokens: int
    page_size: int
    tier: HostTier
    device: torch.device
    thresholds: tuple[int, ...] = ()
    rows: int | None = None
    kernels: bool = False
    weights: Weights | None = None
    steps: Steps | None = None

    def check_rows(self, rows: int) -> None:
        """Raise `BudgetError` for more rows in a step than `thresholds` are for."""
        if self.rows is not None and rows > self.rows:
            raise BudgetError(
                f"{rows} rows: the lengths at which layers leave the device were computed for {self.rows}; compile with "
                f"CompileConfig(rows={rows})"
            )

    def where(self, site: AttentionSite, tokens: int) -> torch.device | None:
        """Where the folded tokens of a site wait when its sequence has `tokens` tokens: a device, or None for the host."""
        return self.device if site.host_from is not None and tokens < site.host_from else None

    @cached_property
    def budgeted(self) -> tuple[AttentionSite, ...]:
        """The stores that the budget counts."""
        return tuple(store for store in self.program.stores if store.treatment == "method")

    @cached_property
    def division(self) -> tuple[tuple[AttentionSite, ...], Plan]:
        """The stores and the plan that the budget is divided by, see `Plan.of_all`."""
        return self.plan.of_all(self.budgeted)

    @cached_property
    def stores(self) -> dict[int, AttentionSite]:
        """The site that owns each store, by the store's number."""
        return {store.store: store for store in self.program.stores}

    @cached_property
    def row_cap(self) -> Callable[[int], float]:
        """Device bytes of the budget that is divided, of a row with so many tokens; every layer of a step asks for the same."""
        return self._cap_of(self.division[0])

    @cached_property
    def cap_of_all(self) -> Callable[[int], float]:
        """The same of all processes that share the model."""
        return self._cap_of(tuple(store.whole for store in self.budgeted))

    def _cap_of(self, stores: tuple[AttentionSite, ...]) -> Callable[[int], float]:
        if self.budget.value is None:
            return lambda tokens: float("inf")
        return lru_cache(maxsize=64)(partial(self.budget.cap_bytes, stores))

    @cached_property
    def whole_token_nbytes(self) -> float:
        """Device bytes of a token, with its position, in all heads that keep every token."""
        stores, plan = self.division
        whole = (part.site(store) for store in stores for part in plan.parts[store.store] if part.components.whole)
        return sum(site.values_per_token * self.budget.dtype.itemsize + 4 * site.once for site in whole)

    @cached_property
    def whole(self) -> Placement:
        """The same for rows that keep every token under the same cap, whatever the method."""
        every = Components(whole=True)
        parts = {store.store: (Part(0, store.kv_heads, every),) for store in self.budgeted}
        return replace(self, plan=Plan(parts, generated=self.plan.generated))

    @property
    def outgrown(self) -> bool:
        """Whether rows that begin whole can grow beyond what the budget holds whole, and are compressed then."""
        longest = self.program.max_positions
        return not self.plan.keeps_generated and not self.budget.exact(UNBOUNDED if longest is None else longest)

    def uncapped(self, site: AttentionSite) -> bool:
        """Whether nothing bounds the recent tokens of a site, so that they may be allocated ahead of need."""
        return site.treatment != "method" or self.budget.uncapped or self.plan.keeps_generated

    def parts(self, store: AttentionSite) -> tuple[Part, ...]:
        """How the KV heads of a store are divided; stores that no method treats are whole."""
        return self._parts[store.store]

    @cached_property
    def _parts(self) -> dict[int, tuple[Part, ...]]:
        given = {store.store: self.plan.parts.get(store.store, ()) for store in self.budgeted}
        return {
            store.store: given.get(store.store) or (Part(0, store.kv_heads, Components()),)
            for store in self.program.stores
        }
