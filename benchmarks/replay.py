"""Steps whose choice overlaps with the step before as much as is asked, at the price of choosing: for states of random keys.

Random keys make every step look elsewhere. Text does not: most of what a step unfolds was unfolded by the step before. Here the
method's own router scores every unit, which takes the time that it takes, and then two drawn scores, whose highest units overlap as
asked, stand in for what it found, in turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.methods.speculation import SpeculativeRouter
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.site_memory import SiteMemory
from semkv.runtime.spans import FoldedSpans
from semkv.runtime.state import State
from semkv.runtime.step import Step

AHEAD = 1024
"""Units that may be folded after the scores were drawn; they are not chosen."""
ABOVE = 100.0
"""Added to drawn scores, so that all are above every threshold and the budget decides."""


def walk(steps: int, heads: int, units: int, kept: float, generator: torch.Generator) -> Iterator[Tensor]:
    """Scores [heads, units] of each step, of which each keeps the share `kept` of the last one (an autoregressive walk)."""
    score = torch.randn(heads, units, generator=generator)
    for _ in range(steps):
        yield score
        score = kept * score + math.sqrt(1 - kept * kept) * torch.randn(heads, units, generator=generator)


def drift_for(overlap: float, units: int, chosen: int) -> float:
    """What a walk keeps from step to step where the share `overlap` of the `chosen` highest units stays."""
    low, high = 0.0, 6.0  # of -log10(1 - kept)
    for _ in range(18):
        middle = (low + high) / 2
        first, second = walk(2, 64, units, 1 - 10**-middle, torch.Generator().manual_seed(0))
        sets = [
            torch.zeros_like(x, dtype=torch.bool).scatter_(1, x.topk(chosen).indices, True) for x in (first, second)
        ]
        stayed = float((sets[0] & sets[1]).sum()) / (64 * chosen)
        low, high = (middle, high) if stayed < overlap else (low, middle)
    return 1 - 10 ** -((low + high) / 2)


class Clock:
    """Seconds spent in what is timed since it was last read."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def read(self) -> float:
        """Them; it begins anew."""
        found, self._seconds = self._seconds, 0.0
        return found

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            made = call(*args, **kwargs)
            self._seconds += time.perf_counter() - started
            return made

        return run


@dataclass(eq=False)
class Replay:
    """A router that works as `router` does, its scores replaced by one of `drawn` [Hq, 1, M] in turns; None: its own."""

    router: Any
    clock: Clock
    drawn: tuple[Tensor, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans, step: Step) -> Tensor:
        own = self.clock.timed(self.router.score)(site, q, spans, step)
        if self.drawn is None:
            return own
        self.drawn = tuple(score.to(own.device) for score in self.drawn)
        return self.drawn[step.tokens % 2][..., : spans.count]


@dataclass(frozen=True)
class _TimedBefore:
    """`semkv.runtime.components.BeforeStep` whose steps are counted."""

    before: Any
    clock: Clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)

    def begin(self, *args: Any) -> None:
        self.clock.timed(self.before.begin)(*args)


@dataclass(frozen=True)
class _TimedAtSite:
    """`semkv.runtime.components.AtSite` whose time is counted."""

    at_site: Any
    clock: Clock

    def stored(self, step: Step) -> None:
        self.clock.timed(self.at_site.stored)(step)


def watch(state: State) -> Clock:
    """Time what a state of one row does to find what it unfolds: retrieval heads, attention of pivots and filters, scores of all units, and
    the choice among them."""
    clock, row = Clock(), state.rows[0]
    plan = row.placement.plan
    before = None if plan.before is None else _TimedBefore(plan.before, clock)
    at_site = {index: _TimedAtSite(one, clock) for index, one in plan.at_site.items()}
    row.placement = replace(row.placement, plan=replace(plan, before=before, at_site=at_site))
    for memory in _choosing(row):
        memory.components = replace(memory.components, router=Replay(memory.components.router, clock))
        memory._select = clock.timed(memory._select)
    return clock


def overlapping(state: State, overlap: float) -> None:
    """Have the steps of a watched state choose units of which the share `overlap` was chosen by the step before."""
    row, kept = state.rows[0], {}
    ranked: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # what all layers that go by one ranking are given
    for store in row.placement.budgeted:
        rooms = row.workspace_allowance(store, row.tokens)
        for memory, room in zip(row.stores[store.store], rooms):
            if memory not in set(_choosing(row)):
                continue
            units = memory.spans.count
            chosen = max(1, int(room / memory.site.kv_heads / memory.spans.unit_nbytes().float().mean()))
            share = round(min(1.0, chosen / units), 3)
            kept.setdefault(share, drift_for(overlap, 4096, max(1, int(4096 * share))))
            generator = torch.Generator().manual_seed(store.store)
            scores = walk(2, memory.site.kv_heads, units, kept[share], generator)
            drawn = tuple(_padded(score, memory) for score in scores)
            if isinstance(memory.components.router.router, SpeculativeRouter):
                drawn = ranked.setdefault((memory.site.kv_heads, units), drawn)
            memory.components.router.drawn = drawn


def _choosing(row: RowMemory) -> list[SiteMemory]:
    return [memory for memory in row.budgeted() if memory.unfolds and memory.spans is not None and memory.spans.count]


def _padded(score: Tensor, memory: SiteMemory) -> Tensor:
    later = torch.nn.functional.pad(score + ABOVE, (0, AHEAD), value=float("-inf"))
    return later.repeat_interleave(memory.site.group_size, 0)[:, None]
