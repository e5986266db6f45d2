"""Steps whose choice overlaps with the step before as much as is asked, at the price of choosing: for states of random keys.

Random keys make every step look elsewhere. Text does not: most of what a step unfolds was unfolded by the step before. Here the
method's own router scores every unit, which takes the time that it takes, and then two drawn scores, whose highest units overlap as
asked, stand in for what it found, in turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.methods.speculation import SpeculativeRouter
from semkv.runtime.components import Bringer, Brought
from semkv.runtime.decode.row_turns import POSITIONS
from semkv.runtime.decode.units import Units
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State
from semkv.runtime.step import Step
from semkv.runtime.store.roomy import room_for
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.views import UnitsView

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


def drawing(router: Any, drawn: tuple[Tensor, ...]) -> Any:
    """A router that works as `router` does, its scores replaced by those of `drawn` [Hq, 1, M], M beyond all units, in turns."""
    kind: Any = type(router)

    class Drawn(kind):
        def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
            own = super().score(site, q, spans, step)
            return drawn[step.tokens % 2][..., : spans.count].to(own.device)

        def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
            own = super().bring(site, step, spans) if isinstance(router, Bringer) else Brought({})
            score = drawn[step.tokens % 2][:, 0].unflatten(0, (site.kv_heads, site.group_size))
            columns = room_for(spans.count)
            if isinstance(router, SpeculativeRouter):  # one for the query heads of a KV head, by position
                score, columns = score[:, :1], (step.tokens + 1 + POSITIONS) // POSITIONS * POSITIONS - own.skipped
            assert spans.count <= score.shape[-1], "more units than there are drawn scores for"
            score = torch.nn.functional.pad(score, (own.skipped, columns - score.shape[-1]), value=float("-inf"))
            return Brought({**own.tensors, "drawn": score.contiguous()}, own.skipped)

        def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
            own = super().scores(site, q, units)
            return torch.where(own == own, units.tensors["drawn"], own)

    made = object.__new__(Drawn)
    made.__dict__.update(router.__dict__)
    return made


def overlapping(state: State, overlap: float) -> None:
    """Have the steps of a state of one row choose units of which the share `overlap` was chosen by the step before."""
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
            router = memory.components.router
            if isinstance(router, SpeculativeRouter):
                drawn = ranked.setdefault((memory.site.kv_heads, units), drawn)
            memory.components = replace(memory.components, router=drawing(router, drawn))


def _choosing(row: RowMemory) -> list[SiteMemory]:
    return [memory for memory in row.budgeted() if memory.unfolds and memory.spans is not None and memory.spans.count]


def _padded(score: Tensor, memory: SiteMemory) -> Tensor:
    later = torch.nn.functional.pad(score + ABOVE, (0, AHEAD), value=float("-inf"))
    return later.repeat_interleave(memory.site.group_size, 0)[:, None]
