"""What the reports on the papers share about time and memory: the bundled model by length, and which way a paper says that they go."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from grids import Bench, table
from replay import watch
from reports import Figures

from semkv.config import CompileConfig
from semkv.evaluation.samples import make_sample
from semkv.evaluation.statistics import quantile
from semkv.evaluation.subject import as_ids
from semkv.evaluation.tables import size

LENGTHS = (2048, 4096, 8192, 16_000)
"""Tokens of context; the bundled model has 16,384 positions."""
STEPS = 48
PREFILLS = 3
LINK = 15.75e9
"""Bytes per second of PCIe 3 with 16 lanes, the slow link of HeteroCache's Table 10."""


@dataclass(frozen=True)
class Contender:
    """A method whose costs are measured; without a budget, the full cache."""

    label: str
    method: str
    budget: float | int | None = None
    options: dict[str, Any] = field(default_factory=dict)


FULL = Contender("full", "full")

Costs = Mapping[str, float]
"""Of a contender at a length: first_s to the first token; step_ms, p95_ms, and of a step choosing_ms and stall_ms (waiting for folded
tokens); bytes on the device at its peak, on the host, and moved per step."""


@torch.no_grad()
def measure(bench: Bench, contenders: Sequence[Contender], length: int) -> dict[str, Costs]:
    """Costs by label. Prefills take turns, and then steps, so that what else the machine does meets all."""
    ids = as_ids(make_sample(bench.tokenizer, "dense", length, 0, seed=0, questions=1).ids)
    config = CompileConfig(kv_dtype="float16", floor=0)
    compiled = {c.label: bench.compiled.with_method(c.method, c.budget, config=config, **c.options) for c in contenders}
    states, first = {}, {label: [] for label in compiled}
    for _ in range(PREFILLS):
        for label, model in compiled.items():
            started = time.perf_counter()
            states[label] = model.prefill(ids)
            first[label].append(time.perf_counter() - started)
    clocks = {label: watch(state) for label, state in states.items()}
    steps, choosing = {label: [] for label in compiled}, {label: [] for label in compiled}
    chance = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for label, model in compiled.items():
            token = int(torch.multinomial(states[label].logits[-1].float().softmax(-1), 1, generator=chance))
            started = time.perf_counter()
            model.extend(states[label], as_ids((token,)))
            steps[label].append(1000 * (time.perf_counter() - started))
            choosing[label].append(1000 * clocks[label].read())
    return {
        label: {
            "first_s": statistics.median(first[label]),
            "step_ms": statistics.median(steps[label]),
            "p95_ms": quantile(steps[label], 0.95),
            "choosing_ms": statistics.median(choosing[label]),
            "stall_ms": state.stats.stall_ms_per_step,
            "device": state.nbytes["peak"],
            "host": state.nbytes["host"],
            "moved": state.stats.moved_bytes_per_step,
        }
        for label, state in states.items()
    }


def by_length(
    bench: Bench, figures: Figures, contenders: Sequence[Contender], lengths: Sequence[int] = LENGTHS
) -> dict[int, dict[str, Costs]]:
    """Costs of the full cache and of `contenders`, by length and label."""
    everyone = (FULL, *contenders)
    found = {}
    for length in lengths:
        settings = {"length": length, "steps": STEPS, "prefills": PREFILLS, "contenders": [asdict(c) for c in everyone]}
        found[length] = figures.get("costs", settings, lambda n=length: measure(bench, everyone, n))
    return found


def costs_table(found: Mapping[int, Mapping[str, Costs]]) -> str:
    """A line per length and contender; times also as multiples of the full cache's."""
    lines = []
    for length, at in found.items():
        full = at[FULL.label]
        for label, cost in at.items():
            lines.append(
                [
                    f"{length:,}",
                    label,
                    f"{cost['first_s']:.2f}",
                    f"{cost['first_s'] / full['first_s']:.2f}",
                    f"{cost['step_ms']:.1f}",
                    f"{cost['p95_ms']:.1f}",
                    f"{cost['step_ms'] / full['step_ms']:.2f}",
                    f"{cost['choosing_ms']:.2f}",
                    f"{cost['stall_ms']:.2f}",
                    size(cost["device"]),
                    size(cost["host"]),
                    size(cost["moved"]),
                    f"{1e6 * cost['moved'] / LINK:.1f}",
                ]
            )
    columns = [
        "tokens",
        "method",
        "first token, s",
        "times full's",
        "step, ms",
        "p95",
        "times full's",
        "of it choosing",
        "of it fetching",
        "device",
        "host",
        "moved per step",
        "on the link, us",
    ]
    return table(columns, lines)


@dataclass(frozen=True)
class Direction:
    """What a paper says of costs; `value` of the costs at a length (tokens, by label), and whether the values over the lengths go that
    way."""

    paper: str
    figure: str
    value: Callable[[int, Mapping[str, Costs]], float]
    holds: Callable[[Sequence[float]], bool]


def level(values: Sequence[float]) -> bool:
    """The same from the first to the last within a fifth."""
    return values[-1] <= 1.2 * values[0]


def rising(values: Sequence[float]) -> bool:
    """More at the end than a fifth above the beginning."""
    return values[-1] > 1.2 * values[0]


def times_full(label: str, cost: str) -> Callable[[int, Mapping[str, Costs]], float]:
    """A contender's cost over the full cache's."""
    return lambda _, at: at[label][cost] / at[FULL.label][cost]


def directions_table(found: Mapping[int, Mapping[str, Costs]], said: Sequence[Direction]) -> str:
    """Each direction with its figure at every length, and whether it is seen here."""
    lines = []
    for one in said:
        values = [one.value(length, at) for length, at in found.items()]
        lines.append(
            [one.paper, one.figure, *[f"{value:.3g}" for value in values], "yes" if one.holds(values) else "no"]
        )
    return table(["the paper says", "figure", *[f"{length:,} tokens" for length in found], "seen here"], lines)


ABOUT = (
    f"Contexts of the dense haystack on a CPU, where the host tier is memory like the device's. Medians of {PREFILLS} prefills with "
    f"their compression and of {STEPS} steps, which take turns. `choosing`: attention of retrieval heads, pivots and filters, scores of "
    "all units and the choice among them; `fetching`: standing still for folded tokens, a mean over the steps like the bytes that are "
    "moved; both in ms. Bytes are of the KV alone: device at its peak, by the tensors that there are. "
    f"`on the link` is arithmetic: what a step moves over {LINK / 1e9:g} GB/s (PCIe 3, 16 lanes). "
)
"""What `costs_table` shows."""
