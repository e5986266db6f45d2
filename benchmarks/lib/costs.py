"""What the reports on the papers share about time and memory: the bundled model by length, and which way a paper says that they go."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.lib.claims import Figures, over_contexts, slope, together, verdict
from benchmarks.lib.grids import Bench, table
from semkv.config import CompileConfig
from semkv.evaluation.schema import Interval
from semkv.evaluation.statistics import quantile
from semkv.evaluation.subject import as_ids
from semkv.evaluation.tables import size

LENGTHS = (2048, 4096, 8192, 16_000)
"""Tokens of context; the bundled model has 16,384 positions."""
CONTEXTS, STEPS = 5, 16
"""Contexts of each length, and steps behind each."""
LEVEL = 0.05
"""What changes by less than this part of its mean with each doubling of the length is level."""
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

Costs = Mapping[str, Any]
"""Of a contender at a length, a number for each context: first_s to the first token; step_ms, p95_ms,
medians; bytes on the device at its peak, on the host, and moved per step."""


@torch.no_grad()
def measure(bench: Bench, contenders: Sequence[Contender], length: int, index: int) -> dict[str, dict[str, float]]:
    """Costs by label behind one context. Steps take turns, so that what else the machine does meets all."""
    ids = as_ids(bench.sample(length, index).ids)
    config = CompileConfig(kv_dtype="float16", floor=0)
    compiled = {c.label: bench.compiled.with_method(c.method, c.budget, config=config, **c.options) for c in contenders}
    states, first = {}, {}
    for label, model in compiled.items():
        started = time.perf_counter()
        states[label] = model.prefill(ids)
        first[label] = time.perf_counter() - started
    steps = {label: [] for label in compiled}
    chance = torch.Generator().manual_seed(index)
    for _ in range(STEPS):
        for label, model in compiled.items():
            token = int(torch.multinomial(states[label].logits[-1].float().softmax(-1), 1, generator=chance))
            started = time.perf_counter()
            model.extend(states[label], as_ids((token,)))
            steps[label].append(1000 * (time.perf_counter() - started))
    return {
        label: {
            "first_s": first[label],
            "step_ms": statistics.median(steps[label]),
            "p95_ms": quantile(steps[label], 0.95),
            "device": state.nbytes["peak"],
            "host": state.nbytes["host"],
            "moved": state.stats.moved_bytes_per_step,
        }
        for label, state in states.items()
    }


def by_length(
    bench: Bench, figures: Figures, contenders: Sequence[Contender], lengths: Sequence[int] = LENGTHS
) -> dict[int, dict[str, Costs]]:
    """Costs of the full cache and of `contenders`, by length and label; lengths beyond the model's context, and contenders that the profile
    or the budget does not serve, are left out."""
    everyone = (FULL, *(one for one in contenders if bench.serves(one.method, one.budget, one.options, one.label)))
    found: dict[int, dict[str, Costs]] = {}
    for length in bench.lengths(lengths, STEPS):
        made = []
        for index in range(bench.arguments.contexts or CONTEXTS):
            settings = {"length": length, "index": index, "steps": STEPS, "contenders": [asdict(c) for c in everyone]}
            made.append(figures.get("costs", settings, lambda n=length, i=index: measure(bench, everyone, n, i)))
        found[length] = {
            label: {name: [one[label][name] for one in made] for name in made[0][label]} for label in made[0]
        }
    return found


def numbers(cost: Costs, name: str) -> list[float]:
    """One cost in every context; results from before there were several have one."""
    held = cost[name]
    return list(held) if isinstance(held, list) else [held]


def costs_table(found: Mapping[int, Mapping[str, Costs]]) -> str:
    """A line per length and contender; times also as multiples of the full cache's."""
    lines = []
    for length, of_all in found.items():
        at = {label: {name: statistics.fmean(numbers(cost, name)) for name in cost} for label, cost in of_all.items()}
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
        "device",
        "host",
        "moved per step",
        "on the link, us",
    ]
    return table(columns, lines)


Series = Mapping[int, Sequence[float]]
"""By length, a value for each context."""


@dataclass(frozen=True)
class Direction:
    """What a paper says of costs; `value` of the costs of one context at a length (tokens, costs by label), and what the values say of it
    (`within`, `at_the_end`, `trend`)."""

    paper: str
    figure: str
    value: Callable[[int, Mapping[str, Mapping[str, float]]], float]
    holds: Callable[[Series], str]


def within(low: float = -math.inf, high: float = math.inf) -> Callable[[Series], str]:
    """Between two bounds at every length."""
    return lambda series: together(verdict(over_contexts(values), low, high) for values in series.values())


def at_the_end(low: float = -math.inf, high: float = math.inf) -> Callable[[Series], str]:
    """Between two bounds at the longest length."""
    return lambda series: verdict(over_contexts(series[max(series)]), low, high)


def trend(low: float = -math.inf, high: float = math.inf) -> Callable[[Series], str]:
    """How the value changes with each doubling of the length, in parts of its mean, by the slope over all contexts."""

    def holds(series: Series) -> str:
        mean = statistics.fmean(value for values in series.values() for value in values)
        points = [(math.log2(length), value / mean) for length, values in series.items() for value in values]
        return verdict(slope(points), low, high)

    return holds


RISING, LEVEL_OVER_LENGTHS = trend(low=0.0), trend(-LEVEL, LEVEL)


def times_full(label: str, cost: str) -> Callable[[int, Mapping[str, Mapping[str, float]]], float]:
    """A contender's cost over the full cache's."""
    return lambda _, at: at[label][cost] / at[FULL.label][cost]


def series_of(found: Mapping[int, Mapping[str, Costs]], one: Direction) -> dict[int, list[float]]:
    """The values of a direction, context by context."""
    series = {}
    for length, at in found.items():
        contexts = len(numbers(at[FULL.label], "step_ms"))
        each = [{label: {n: numbers(c, n)[i] for n in c} for label, c in at.items()} for i in range(contexts)]
        series[length] = [one.value(length, costs) for costs in each]
    return series


def directions_table(found: Mapping[int, Mapping[str, Costs]], said: Sequence[Direction]) -> str:
    """Each direction with its figure at every length and its interval over contexts, and whether it is seen."""
    lines = []
    for one in said:
        try:
            series = series_of(found, one)
        except KeyError:  # a contender that was left out
            lines.append([one.paper, one.figure, *["-"] * len(found), "not measured"])
            continue
        lines.append(
            [one.paper, one.figure, *[spread(over_contexts(values)) for values in series.values()], one.holds(series)]
        )
    return table(["the paper says", "figure", *[f"{length:,} tokens" for length in found], "here"], lines)


def spread(found: Interval) -> str:
    """A value with its interval."""
    bounds = "" if found.low is None or found.high is None else f" ({found.low:.3g} to {found.high:.3g})"
    return f"{found.value:.3g}{bounds}"


ABOUT = (
    f"{CONTEXTS} contexts of each length on a CPU, where the host tier is memory like the device's: of each, the prefill with its "
    f"compression and the median of {STEPS} steps, which take turns; means over contexts, in brackets their 95 % interval. What the paper "
    "says is seen, or not, where the interval tells; a trend is the slope over all contexts with each doubling of the length, and level "
    f"is less than {100 * LEVEL:g} % of the mean. Bytes are of the KV alone: device at its peak, by the tensors that there are. "
    f"`on the link` is arithmetic: what a step moves over {LINK / 1e9:g} GB/s (PCIe 3, 16 lanes). "
)
"""What `costs_table` shows."""
