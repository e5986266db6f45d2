"""What the reports on the papers share: claims and their verdicts, figures that resume, pictures of sweeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ablations import direction
from grids import RESULTS, table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from quality import points

from semkv.evaluation import Report
from semkv.evaluation.plots import DPI, INK, styles
from semkv.evaluation.schema import Interval, Summary
from semkv.evaluation.tables import percent

Way = Literal["lower", "higher", "equal"]
EQUAL = 0.05
"""Accuracies that differ by no more than this are equal."""


@dataclass(frozen=True)
class Claim:
    """A comparison that a paper makes: the variant `label` against `base` at one budget, which way it goes, its figures."""

    label: str
    base: str
    way: Way
    paper: str
    budget: float | None = None


def verdict(change: Interval, way: Way) -> str:
    """Whether a paired change goes the way that the paper says, by its 95 % interval; equal is within `EQUAL`."""
    ours = direction(change)
    if ours != "open":
        return "yes" if ours == way else "no"
    known = change.low is not None and change.high is not None
    return "yes" if way == "equal" and known and max(-change.low, change.high) <= EQUAL else "open"


def claims_table(report: Report, claims: Sequence[Claim]) -> str:
    """Each claim: accuracy, change against its base on the same questions, and whether the paper says the same."""
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
                verdict(change, claim.way),
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
        "seen here",
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
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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
