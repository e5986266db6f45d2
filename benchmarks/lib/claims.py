"""What the reports on the papers share: claims and their verdicts, figures that resume, pictures of sweeps."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.lib.grids import as_text, table
from benchmarks.lib.places import RESULTS
from benchmarks.quality.quality import points
from semkv.evaluation import Report
from semkv.evaluation.plots import DPI, INK, styles
from semkv.evaluation.schema import Interval, Summary
from semkv.evaluation.statistics import ratio_estimate, student_quantile
from semkv.evaluation.tables import percent

Way = Literal["lower", "higher", "equal"]
EQUAL = 0.05
"""Accuracies that differ by no more than this are equal."""
WAYS: dict[Way, tuple[float, float]] = {
    "lower": (-math.inf, 0.0),
    "higher": (0.0, math.inf),
    "equal": (-EQUAL, EQUAL),
}
"""Between what bounds a paired change lies that goes each way."""
SEEN, NOT_SEEN, OPEN = "seen", "not seen", "open"


@dataclass(frozen=True)
class Claim:
    """A comparison that a paper makes: the variant `label` against `base` at one budget, which way it goes, its figures."""

    label: str
    base: str
    way: Way
    paper: str
    budget: float | None = None


def verdict(found: Interval | None, low: float = -math.inf, high: float = math.inf) -> str:
    """Whether a value is between two bounds by its 95 % interval, clustered by context: `seen` where the interval lies between them, `not
    seen` where it lies beyond one of them, `open` where the contexts do not tell, or are too few for an interval."""
    if found is None or found.low is None or found.high is None:
        return OPEN
    if low < found.low and found.high < high:
        return SEEN
    return NOT_SEEN if found.high < low or found.low > high else OPEN


def together(verdicts: Iterable[str]) -> str:
    """Of what has to hold in every case: `seen` where all are, `not seen` where any is not."""
    given = list(verdicts)
    if NOT_SEEN in given:
        return NOT_SEEN
    return SEEN if given and all(one == SEEN for one in given) else OPEN


def over_contexts(values: Sequence[float]) -> Interval:
    """The mean of one value from each context, with its interval."""
    return Interval.of(ratio_estimate(values, [1.0] * len(values), range(len(values))))


def slope(points: Sequence[tuple[float, float]]) -> Interval:
    """Least squares of y on x, a point per context, with the interval of Student's t; without bounds for fewer than three points or where
    all stand above each other."""
    n = len(points)
    middle = math.fsum(x for x, _ in points) / n
    spread = math.fsum((x - middle) ** 2 for x, _ in points)
    if spread == 0.0:
        return Interval(value=0.0, low=None, high=None, samples=n, contexts=n)
    mean = math.fsum(y for _, y in points) / n
    value = math.fsum((x - middle) * (y - mean) for x, y in points) / spread
    if n < 3:
        return Interval(value=value, low=None, high=None, samples=n, contexts=n)
    rest = math.fsum((y - mean - value * (x - middle)) ** 2 for x, y in points) / (n - 2)
    half = student_quantile(0.975, n - 2) * math.sqrt(rest / spread)
    return Interval(value=value, low=value - half, high=value + half, samples=n, contexts=n)


def claims_table(report: Report, claims: Sequence[Claim]) -> str:
    """Each claim: accuracy, change against its base on the same questions, and whether what the paper says is seen."""
    found: dict[tuple[str, Any], Summary] = {(s.variant.label, s.variant.budget): s for s in report.summaries}
    lines = []
    for claim in claims:
        summary = found.get((claim.label, claim.budget))
        change = summary.ahead.get(claim.base) if summary is not None else None
        if summary is None or change is None:
            continue
        lines.append(
            [
                claim.label,
                claim.base,
                summary.variant.budget_text,
                percent(summary.accuracy),
                points(change),
                claim.way,
                claim.paper,
                verdict(change, *WAYS[claim.way]),
            ]
        )
    columns = [
        "variant",
        "against",
        "budget",
        "mean, %",
        "change, points",
        "paper says",
        "paper's figures",
        "here",
    ]
    return table(columns, lines)


def curve(report: Report, budget: float, labels: Mapping[float, str]) -> list[tuple[float, Interval]]:
    """Mean accuracy at `budget` of the variants `labels`, by the value that they stand for."""
    found = {s.variant.label: s.accuracy for s in report.summaries if s.variant.budget == budget}
    return [(value, found[label]) for value, label in labels.items() if label in found]


class Figures:
    """Measurements that are no cells of a grid, one JSON line each, so that a run that stops goes on."""

    def __init__(self, path: Path, identity: str):
        self.path, self.identity = path, identity
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self._known = {row["key"]: row["value"] for row in map(json.loads, lines)}

    def get(self, name: str, settings: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """What was measured under this name and these settings, as JSON holds it; measured now where it was not."""
        text = json.dumps([self.identity, name, dict(settings)], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:20]
        if key not in self._known:
            value = json.loads(json.dumps(measure()))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "name": name, "settings": dict(settings), "value": value}) + "\n")
            self._known[key] = value
        return self._known[key]


def write_parts(name: str, reports: Mapping[str, Report], figures: Mapping[str, Any]) -> None:
    """`benchmarks/results/NAME.json`: several reports by name, and the figures that are no cells of a grid."""
    content = {"reports": {key: report.model_dump(mode="json") for key, report in reports.items()}, **figures}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(as_text(content), encoding="utf-8")


def draw_curves(
    path: Path,
    title: str,
    subtitle: str,
    x_label: str,
    curves: Mapping[str, Sequence[tuple[float, Interval]]],
    scattered: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Path:
    """Accuracy in percent against a parameter, a line with its 95 % interval per curve, at evenly spaced places.

    scattered: points without a line, side by side where they share a place.
    """
    figure = Figure(figsize=(6.4, 3.9), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    scattered = scattered or {}
    places = {
        value: i
        for i, value in enumerate(sorted({x for line in (*curves.values(), *scattered.values()) for x, _ in line}))
    }
    drawn = styles([*curves, *scattered])
    for i, (label, line) in enumerate(curves.items()):
        below = [100 * (y.value - (y.value if y.low is None else y.low)) for _, y in line]
        above = [100 * ((y.value if y.high is None else y.high) - y.value) for _, y in line]
        axes.errorbar(
            [places[x] + 0.05 * (i - (len(curves) - 1) / 2) for x, _ in line],
            [100 * y.value for _, y in line],
            yerr=[below, above],
            label=label,
            **drawn[label],
            markersize=5,
            linewidth=1.6,
            elinewidth=1.0,
            capsize=2,
        )
    for label, line in scattered.items():
        seen: dict[float, int] = {}
        for x, y in line:
            seen[x] = seen.get(x, 0) + 1
            axes.plot(
                [places[x] + 0.1 + 0.05 * seen[x]],
                [100 * y],
                **drawn[label],
                linestyle="none",
                markersize=5,
                alpha=0.8,
                label=label if sum(seen.values()) == 1 else None,
            )
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.text(0.0, 1.02, subtitle, transform=axes.transAxes, fontsize=9, color="#666666")
    axes.set_xticks(range(len(places)), [f"{value:g}" for value in places])
    axes.set_ylim(-3, 103)
    axes.set_xlabel(f"{x_label}\nbars: 95 % interval, clustered by context", fontsize=9, color=INK)
    axes.set_ylabel("exact answers (%)", fontsize=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path
