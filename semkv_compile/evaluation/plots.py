"""Pictures of a report: accuracy against budget, needle heat maps, zoom-rate heat maps.

Figures are explicit objects drawn by Agg: no pyplot, no global state, no display. Colours are Okabe and Ito's, which
colour-blind readers tell apart, and every line has its own marker; heat maps use cividis and print their numbers where
there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from semkv.evaluation.attention_mass import add_masses
from semkv.evaluation.schema import CellResult, Interval, Mass, Report, Zoom
from semkv.evaluation.settings import Variant
from semkv.evaluation.subject import add_zooms
from semkv.evaluation.tables import what_is_scored

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#444444")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = {
    "auto": (0, 0),
    "sekv": (1, 1),
    "specontext": (2, 2),
    "heterocache": (3, 3),
    "sentencekv": (4, 4),
    "compresskv": (5, 5),
    "quest": (6, 6),
    "snapkv": (7, 7),
    "mixed": (0, 3),
    "sketch": (0, 1),
    "ceiling": (7, 2),
    "streaming_llm": (3, 0),
    "h2o": (4, 0),
    "pyramidkv": (5, 1),
    "chunkkv": (2, 0),
    "cake": (6, 2),
    "semanticache": (1, 4),
    "shadowkv": (3, 6),
    "omnikv": (2, 6),
    "infllm": (4, 7),
    "clusterkv": (5, 7),
    "indexer": (6, 4),
}
"""Colour and marker of a method, the same in every picture; forms of it ("heterocache, strict") have its colour and a hollow marker."""
DPI = 144
INK = "#333333"
PANEL = 2.7  # inches
ACROSS = 6  # heat maps side by side; more of them take further rows


def figure_of(width: float, height: float, title: str, subtitle: str) -> Figure:
    """An empty figure of so many inches under a title."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    # The blank lines keep room for the subtitle, which the layout does not know of.
    figure.suptitle(f"{title}\n\n", x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    figure.text(0.01, 1.0 - 0.34 / height, subtitle, ha="left", va="top", fontsize=9, color="#666666")
    return figure


def styles(labels: Sequence[str]) -> dict[str, dict[str, str]]:
    """How to draw each label's line: methods by `STYLES`, other labels in the colours that are left, in their order."""
    known = {label: STYLES[label.split(", ")[0]] for label in labels if label.split(", ")[0] in STYLES}
    taken = {colour for colour, _ in known.values()}
    free = [place for place in range(len(COLOURS)) if place not in taken] or list(range(len(COLOURS)))
    others = [label for label in labels if label not in known]
    places = known | {label: (free[i % len(free)], free[i % len(free)]) for i, label in enumerate(others)}
    return {
        label: {
            "color": COLOURS[colour],
            "marker": MARKERS[marker],
            "markerfacecolor": "white" if label in known and label not in STYLES else COLOURS[colour],
        }
        for label, (colour, marker) in places.items()
    }


def plain(axes: Axes) -> None:
    """Axes without what is not data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return path


def _arms(interval: Interval) -> tuple[float, float]:
    low = interval.value if interval.low is None else interval.low
    high = interval.value if interval.high is None else interval.high
    return 100 * (interval.value - low), 100 * (high - interval.value)


def scored(report: Report) -> Report:
    """The report without cells whose figure is a likelihood, and without summaries of nothing else."""
    cells = [c for c in report.cells if c.perplexity is None]
    names = {c.cell.family for c in cells}
    return report.model_copy(
        update={"cells": cells, "summaries": [s for s in report.summaries if names.issuperset(s.families)]}
    )


def accuracy_by_budget(report: Report, question: str, length: int, path: Path) -> Path | None:
    """Scores against the budget: a panel for the mean and one per family, a line per method.

    The full cache is a dashed line; what is measured as likelihood is left out. None where no variant has a fractional
    budget.
    """
    report = scored(report)
    summaries = [s for s in report.summaries if s.question == question and s.length == length]
    budgets = sorted({s.variant.budget for s in summaries if isinstance(s.variant.budget, float)})
    labels = list(dict.fromkeys(s.variant.label for s in summaries if isinstance(s.variant.budget, float)))
    if not budgets:
        return None
    names = list(
        dict.fromkeys(c.cell.family for c in report.cells if c.cell.question == question and c.cell.length == length)
    )
    points: dict[tuple[str, str, float | None], Interval] = {}
    for summary in summaries:
        points["mean", summary.variant.label, _fraction(summary.variant)] = summary.accuracy
    for cell in report.cells:
        if cell.cell.question == question and cell.cell.length == length:
            points[cell.cell.family, cell.cell.variant.label, _fraction(cell.cell.variant)] = cell.accuracy
    panels = ["mean", *names]
    figure = figure_of(
        max(PANEL * len(panels), 6.0),
        3.9,
        f"{what_is_scored(report)} against the KV budget, {length} tokens, question {question}",
        f"{report.model}; bars: 95 % interval clustered by context",
    )
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    places = {budget: i for i, budget in enumerate(budgets)}
    drawn = styles(labels)
    for axes, panel in zip(all_axes, panels):
        plain(axes)
        full = points.get((panel, "full", None))
        if full is not None:
            axes.axhline(100 * full.value, color="black", linestyle="--", linewidth=1.2, label="full")
        for i, label in enumerate(labels):
            found = [(places[b], points[panel, label, b]) for b in budgets if (panel, label, b) in points]
            if not found:
                continue
            shift = (i - (len(labels) - 1) / 2) * 0.05
            axes.errorbar(
                [x + shift for x, _ in found],
                [100 * interval.value for _, interval in found],
                yerr=np.array([_arms(interval) for _, interval in found]).T,
                **drawn[label],
                markersize=5,
                linewidth=1.6,
                elinewidth=1.0,
                capsize=2,
                label=label,
            )
        axes.set_title("mean of the families" if panel == "mean" else panel, fontsize=9, color=INK, loc="left")
        axes.set_xticks(range(len(budgets)), [f"{100 * b:g}" for b in budgets])
        axes.set_xlim(-0.4, len(budgets) - 0.6)
        axes.set_ylim(-3, 103)
        axes.set_xlabel("budget (% of the full KV)", fontsize=8, color=INK)
    all_axes[0].set_ylabel(f"{what_is_scored(report).lower()} (%)", fontsize=8, color=INK)
    handles, texts = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=min(len(texts), 6), frameon=False, fontsize=8)
    return save(figure, path)


def _fraction(variant: Variant) -> float | None:
    return variant.budget if isinstance(variant.budget, float) else None


def _heat(axes: Axes, values: np.ndarray, *, low: float, high: float, numbers: bool):
    """An image with one cell per value; NaN cells are hatched, not coloured."""
    axes.set_facecolor("#F2F2F2")
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colormaps["viridis"], vmin=low, vmax=high, aspect="auto")
    axes.tick_params(labelsize=7, colors=INK, length=0)
    axes.set_xticks(np.arange(values.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(values.shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    if numbers:
        for y, x in np.ndindex(values.shape):
            if not math.isnan(values[y, x]):
                dark = (values[y, x] - low) / ((high - low) or 1.0) < 0.55
                axes.text(
                    x,
                    y,
                    f"{values[y, x]:.0f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else "black",
                )
    return image


def needle_heatmap(
    report: Report, question: str, budget: float | int | None, path: Path, bins: int = 10
) -> Path | None:
    """Scores by depth of the evidence (rows), all families whose evidence has a place.

    Of several lengths a panel per method, its columns the lengths; of one length a single panel, its columns the methods.
    `budget` chooses the compressing variants; the full cache is shown beside them. None where nothing is measured.
    """
    chosen = [
        c for c in report.cells if c.depths and c.cell.question == question and c.cell.variant.budget in (budget, None)
    ]
    labels = list(dict.fromkeys(c.cell.variant.label for c in chosen))
    lengths = sorted({c.cell.length for c in chosen})
    if not labels:
        return None
    samples = sum(c.accuracy.samples for c in chosen if c.cell.variant.label == labels[0])
    text = chosen[-1].cell.variant.budget_text if budget is not None else "-"
    of = {
        (label, length): [c for c in chosen if c.cell.variant.label == label and c.cell.length == length]
        for label in labels
        for length in lengths
    }
    panels: list[tuple[str, list[tuple[str, int]]]] = (
        [("", list(of))] if len(lengths) == 1 else [(label, [(label, n) for n in lengths]) for label in labels]
    )
    rows, across = math.ceil(len(panels) / ACROSS), min(len(panels), ACROSS)
    where = f", {_tokens(lengths[0])} tokens" if len(lengths) == 1 else " and context length"
    figure = figure_of(
        max(1.6 + (0.9 + 0.42 * len(panels[0][1])) * across, 6.6),
        (4.3 if len(lengths) > 1 else 5.2) if rows == 1 else 1.0 + 3.2 * rows,
        f"{what_is_scored(report)} by depth of the needle{where}, budget {text}",
        f"{report.model}; question {question}, mean of all families, {samples} questions per method",
    )
    all_axes = figure.subplots(rows, across, sharex=True, sharey=True, squeeze=False).ravel()
    image = None
    for axes, (title, columns) in zip(all_axes, panels):
        grid = np.array([[_at_depth(of[column], (y + 0.5) / bins) for column in columns] for y in range(bins)])
        image = _heat(axes, 100 * grid, low=0.0, high=100.0, numbers=True)
        axes.set_title(title, fontsize=9, color=INK, loc="left")
        if title:
            axes.set_xticks(range(len(columns)), [_tokens(n) for _, n in columns])
        else:
            axes.set_xticks(range(len(columns)), [label for label, _ in columns], rotation=40, ha="right")
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    if len(lengths) > 1:
        figure.supxlabel("context (tokens)", fontsize=8, color=INK)
    all_axes[0].set_yticks(range(bins), [f"{100 * y // bins}-{100 * (y + 1) // bins}" for y in range(bins)])
    figure.supylabel("depth of the evidence (% of the context)", fontsize=8, color=INK)
    bar = figure.colorbar(image, ax=list(all_axes), shrink=0.9, pad=0.01)
    bar.set_label(f"{what_is_scored(report).lower()} (%)", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    return save(figure, path)


def _at_depth(cells: Sequence[CellResult], depth: float) -> float:
    """Accuracy over cells of the questions whose bin holds `depth`; NaN where there are none."""
    right, asked = 0.0, 0
    for cell in cells:
        for item in cell.depths:
            if item.start <= depth < item.stop:
                right += item.accuracy.value * item.accuracy.samples
                asked += item.accuracy.samples
    return right / asked if asked else math.nan


def _tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def _by_head(
    maps: Sequence[tuple[str, np.ndarray]], path: Path, title: str, subtitle: str, label: str, top: float | None = None
) -> Path:
    """Heat maps of layers (rows) by query heads (columns) beside each other, in percent; top: of the colours, None: the largest value."""
    layers, heads = (max(values.shape[axis] for _, values in maps) for axis in (0, 1))
    across = min(len(maps), ACROSS)
    rows = math.ceil(len(maps) / across)
    figure = figure_of(
        max(1.6 + across * (0.6 + 0.36 * min(heads, 20)), 6.0),
        max(3.0, 1.0 + rows * (0.8 + 0.32 * min(layers, 24))),
        title,
        subtitle,
    )
    all_axes = figure.subplots(rows, across, sharey=True, squeeze=False).ravel()
    high = top or max(float(np.nanmax(values)) for _, values in maps) or 1.0
    image = None
    for axes, (name, values) in zip(all_axes, maps):
        image = _heat(axes, values, low=0.0, high=high, numbers=layers * heads <= 128)
        axes.set_title(name, fontsize=9, color=INK, loc="left")
        axes.set_xlabel("query head", fontsize=8, color=INK)
        axes.set_xticks(range(0, heads, max(1, heads // 8)))
        axes.set_yticks(range(0, layers, max(1, layers // 12)))
    for axes in all_axes[len(maps) :]:
        axes.set_visible(False)
    all_axes[0].set_ylabel("layer", fontsize=8, color=INK)
    bar = figure.colorbar(image, ax=list(all_axes), shrink=0.9, pad=0.01)
    bar.set_label(label, fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    return save(figure, path)


def mass_heatmap(report: Report, question: str, length: int, budget: float | int, path: Path) -> Path | None:
    """Share of the far attention that a method's choice catches, by layer and query head; a panel per method, all tasks together.

    None where it was not measured.
    """
    found: dict[str, Mass | None] = {}
    for cell in report.cells:
        if cell.mass and (cell.cell.question, cell.cell.length, cell.cell.variant.budget) == (question, length, budget):
            found[cell.cell.variant.label] = add_masses(found.get(cell.cell.variant.label), cell.mass)
    maps = []
    for label, mass in found.items():
        assert mass is not None
        values = np.full((max(mass.sites) + 1, max(map(len, mass.far))), math.nan)
        for site, caught, far in zip(mass.sites, mass.caught, mass.far):
            values[site, : len(far)] = [100 * part / whole if whole else math.nan for part, whole in zip(caught, far)]
        maps.append((f"{label}: {100 * mass.of_all:.0f} %", values))
    if not maps:
        return None
    return _by_head(
        maps,
        path,
        f"Attention to far tokens that a budget of {_budget(budget)} catches",
        f"{report.model}; {length} tokens, question {question}; far: behind the first 4, before the last 32",
        "caught (%)",
        100.0,
    )


def _budget(budget: float | int) -> str:
    return Variant(method="full", budget=budget).budget_text


def zoom_heatmap(
    report: Report, question: str, length: int, path: Path, method: str = "sekv", sites: int | None = None
) -> Path | None:
    """Share of folded units (spans, pages, tokens) unfolded per decode step, by layer (rows) and query head (columns); a panel per budget.

    Families are averaged, as in SeKV's Figures 5 and 6. Of a method that fills its budget (`sekv` with `fill=True`) the map is even by
    construction, as every head has what there is room for: draw runs with `fill=False`. None where no cell counted zooms. sites:
    attention sites of the model, each of which has a row; without it, up to the last that any method of the report zooms into.
    """
    found = [
        c
        for c in report.cells
        if c.zoom and c.cell.question == question and c.cell.length == length and c.cell.variant.label == method
    ]
    budgets = list(dict.fromkeys(c.cell.variant.budget_text for c in found))
    if not budgets:
        return None
    last = max(max(c.zoom.sites, default=0) for c in report.cells if c.zoom)
    maps = []
    for budget in budgets:
        zooms = [c.zoom for c in found if c.zoom and c.cell.variant.budget_text == budget]
        maps.append((f"budget {budget}", _zoom_map(zooms, max(last + 1, sites or 0))))
    return _by_head(
        maps,
        path,
        f"What {method} unfolds, by layer and query head",
        f"{report.model}; {length} tokens, question {question}; grey: nothing to unfold",
        "unfolded (%), mean over steps",
    )


def _zoom_map(zooms: Sequence[Zoom], sites: int) -> np.ndarray:
    """Mean rates in percent, [sites, most query heads of one]; NaN where there is no such head or nothing to unfold."""
    total = None
    for zoom in zooms:
        total = add_zooms(total, zoom)
    assert total is not None
    values = np.full((sites, max(len(rates) for rates in total.rates)), math.nan)
    for site, rates in zip(total.sites, total.rates):
        values[site, : len(rates)] = [100 * rate for rate in rates]
    return values


def draw_all(report: Report, folder: str | Path, sites: int | None = None) -> list[Path]:
    """Every picture that the report has data for, in `folder`; returns their paths. sites: as in `zoom_heatmap`."""
    folder = Path(folder)
    made: list[Path | None] = []
    questions = list(dict.fromkeys(c.cell.question for c in report.cells))
    for question in questions:
        cells = [c.cell for c in report.cells if c.cell.question == question]
        compressed = list(dict.fromkeys(c.variant.budget for c in cells if c.variant.budget is not None))
        for length in dict.fromkeys(c.length for c in cells):
            for budget in compressed:
                path = folder / f"mass_{question}_{length}_budget_{budget:g}.png"
                made.append(mass_heatmap(report, question, length, budget, path))
            made.append(accuracy_by_budget(report, question, length, folder / f"accuracy_{question}_{length}.png"))
            for label in dict.fromkeys(c.variant.label for c in cells):
                made.append(
                    zoom_heatmap(
                        report, question, length, folder / f"zoom_{_slug(label)}_{question}_{length}.png", label, sites
                    )
                )
        for budget in compressed or [None]:
            name = "full" if budget is None else f"{budget:g}"
            made.append(needle_heatmap(report, question, budget, folder / f"needles_{question}_budget_{name}.png"))
    return [path for path in made if path is not None]


def _slug(text: str) -> str:
    return "".join(ch if ch.isalnum() else "_" for ch in text).strip("_")
