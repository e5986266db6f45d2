"""Rows to a report: scores with intervals, ratios to the full cache, bytes and times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from semkv.evaluation.agreement import agreement
from semkv.evaluation.attention_mass import add_masses
from semkv.evaluation.gain import WINDOW, recovered
from semkv.evaluation.runner import all_tasks, cell_of, missing_work, plan_of
from semkv.evaluation.schema import (
    Agreement,
    CellResult,
    DepthBin,
    Environment,
    Interval,
    Mass,
    Recovered,
    Report,
    Row,
    Summary,
    Timing,
    Usage,
    Zoom,
)
from semkv.evaluation.settings import Cell, Grid, QuestionMode, Variant
from semkv.evaluation.statistics import proportion, quantile, ratio_estimate
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import add_zooms, worst
from semkv.evaluation.tasks.base import Task

DEPTH_BINS = 10
FAILED = 0.2
"""A task on which the full cache itself scores less is in no mean: nothing can be lost there."""


Pairs = list[tuple[str, Row, Row]]
"""Family, and two variants' rows of the same context."""


def _aligned(pairs: Pairs) -> tuple[list[float], list[float], list[tuple[str, int]], list[str]]:
    """Outcomes of both sides on the questions that both answered, their contexts and their families."""
    first, second, contexts, names = [], [], [], []
    for family, row, other in pairs:
        for mine, theirs in zip(row.answers, other.answers):
            first.append(mine.value)
            second.append(theirs.value)
            contexts.append((family, row.context))
            names.append(family)
    return first, second, contexts, names


def ratio(pairs: Pairs) -> Interval | None:
    """Mean accuracy of the first rows over the second's on the same questions; None where the second has none right."""
    first, second, contexts, names = _aligned(pairs)
    return Interval.of(ratio_estimate(first, second, contexts, strata=names)) if any(second) else None


def ahead(pairs: Pairs) -> Interval | None:
    """Mean accuracy of the first rows minus the second's on the same questions; None where they share none."""
    first, second, contexts, names = _aligned(pairs)
    if not first:
        return None
    differences = [a - b for a, b in zip(first, second)]
    return Interval.of(ratio_estimate(differences, [1.0] * len(differences), contexts, strata=names))


def timing(rows: Sequence[Row]) -> Timing:
    """Median and 95th percentile over all decode steps."""
    steps = [t for row in rows for t in row.step_us]
    if not steps:
        return Timing(median=None, p95=None, steps=0)
    return Timing(median=quantile(steps, 0.5), p95=quantile(steps, 0.95), steps=len(steps))


def depth_bins(rows: Sequence[Row], bins: int = DEPTH_BINS) -> list[DepthBin]:
    """Accuracy per depth of the evidence; bins without a question are left out."""
    result = []
    for i in range(bins):
        found = [
            (answer.value, row.context)
            for row in rows
            for answer in row.answers
            if answer.depth is not None and min(int(answer.depth * bins), bins - 1) == i
        ]
        if found:
            values, contexts = zip(*found)
            result.append(
                DepthBin(start=i / bins, stop=(i + 1) / bins, accuracy=Interval.of(proportion(values, contexts)))
            )
    return result


def total_usage(rows: Sequence[Row]) -> Usage:
    """The worst memory over rows, and all their transfers."""
    usage: Usage | None = None
    for row in rows:
        usage = worst(usage, row.usage)
    assert usage is not None
    return usage


def total_zoom(rows: Sequence[Row]) -> Zoom | None:
    """Zoom rates over all steps of all rows."""
    total: Zoom | None = None
    for row in rows:
        total = add_zooms(total, row.zoom)
    return total


def total_mass(rows: Sequence[Row]) -> Mass | None:
    """Far attention of all rows."""
    total: Mass | None = None
    for row in rows:
        total = add_masses(total, row.mass)
    return total


def _per_step(usage: Usage) -> float:
    return usage.moved / usage.steps if usage.steps else 0.0


def _pairs(rows: dict[str, list[Row]], others: dict[str, list[Row]]) -> Pairs:
    """Rows of the same family and context."""
    found: Pairs = []
    for family, mine in rows.items():
        theirs = {row.context: row for row in others.get(family, [])}
        found += [(family, row, theirs[row.context]) for row in mine if row.context in theirs]
    return found


def build_report(
    grid: Grid,
    identity: str,
    store: RowStore,
    environment: Environment,
    *,
    title: str,
    model: str,
    notes: Sequence[str] = (),
    tasks: Mapping[str, Task] | None = None,
) -> Report:
    """Everything that `store` holds of `grid`, aggregated. Cells without a row are left out; `complete` tells."""
    known = all_tasks(tasks)
    cells: list[CellResult] = []
    summaries: list[Summary] = []
    commits: set[str] = set()

    def cell_for(variant: Variant, family: str, length: int, question: QuestionMode) -> Cell:
        return cell_of(grid, identity, variant, family, length, question, known.get(family))

    def rows_of(cell: Cell) -> list[Row]:
        plan = plan_of(grid, known.get(cell.family))
        found = store.rows(cell.key, range(plan.contexts))
        return [row.model_copy(update={"answers": row.answers[: plan.asked(row.context)]}) for row in found]

    for question in grid.questions:
        for length in grid.lengths:
            measured: list[tuple[Variant, dict[str, list[Row]]]] = []
            for variant in grid.variants:
                found = {f: rows_of(cell_for(variant, f, length, question)) for f in grid.families}
                measured.append((variant, {family: rows for family, rows in found.items() if rows}))
            base = next((by_family for variant, by_family in measured if variant.method == "full"), {})
            windows = {variant.budget: by_family for variant, by_family in measured if variant.method == WINDOW}
            for variant, by_family in measured:
                for family, rows in by_family.items():
                    commits.update(row.commit for row in rows)
                    cell = cell_for(variant, family, length, question)
                    near = windows.get(variant.budget, {}).get(family, ())
                    gained = recovered(rows, base.get(family, ()), near)
                    agreed = agreement(rows, base.get(family, ())) if grid.agreement else None
                    cells.append(_cell_result(cell, rows, ratio(_pairs({family: rows}, base)), gained, agreed))
                if by_family:
                    summaries.append(_summary(variant, length, question, _averaged(by_family, base), base, measured))
    return Report(
        title=title,
        model=model,
        complete=not missing_work(grid, identity, store, tasks),
        commits=sorted(commits),
        environment=environment,
        cells=cells,
        summaries=summaries,
        notes=list(notes),
    )


def perplexity(rows: Sequence[Row]) -> Interval | None:
    """exp of the mean negative log-likelihood of all tokens, its bounds those of the mean; None without any."""
    found = [(answer.nats, answer.expected, row.context) for row in rows for answer in row.answers if answer.nats]
    if not found:
        return None
    nats, tokens, contexts = zip(*found)
    mean = ratio_estimate(nats, tokens, contexts)
    return Interval.of(replace(mean, value=math.exp(mean.value), low=math.exp(mean.low), high=math.exp(mean.high)))


def _averaged(by_family: dict[str, list[Row]], base: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """The families that a mean is taken of: not a likelihood beside scores, as the two are different things, and not what the full cache
    (`base`) fails at; all where none is left."""
    scored = {f: rows for f, rows in by_family.items() if not any(a.nats for row in rows for a in row.answers)}
    able = {f: rows for f, rows in scored.items() if not failed(base.get(f, ()))}
    return able or scored or by_family


def failed(full: Sequence[Row]) -> bool:
    """Whether the full cache's rows of a task score less than `FAILED`; without rows nobody knows."""
    values = [answer.value for row in full for answer in row.answers]
    return bool(values) and sum(values) < FAILED * len(values)


def _cell_result(
    cell: Cell, rows: list[Row], of_full: Interval | None, gained: Recovered | None, agreed: Agreement | None
) -> CellResult:
    usage = total_usage(rows)
    values = [answer.value for row in rows for answer in row.answers]
    return CellResult(
        cell=cell,
        accuracy=Interval.of(proportion(values, [row.context for row in rows for _ in row.answers])),
        perplexity=perplexity(rows),
        recovered=gained,
        agreement=agreed,
        ratio=of_full,
        depths=depth_bins(rows),
        usage=usage,
        device_share=usage.device / usage.full if usage.full else 0.0,
        moved_per_step=_per_step(usage),
        step_us=timing(rows),
        zoom=total_zoom(rows),
        mass=total_mass(rows),
    )


def _summary(
    variant: Variant,
    length: int,
    question: QuestionMode,
    by_family: dict[str, list[Row]],
    base: dict[str, list[Row]],
    measured: Sequence[tuple[Variant, dict[str, list[Row]]]],
) -> Summary:
    flat = [(family, row, answer) for family, rows in by_family.items() for row in rows for answer in row.answers]
    all_rows = [row for rows in by_family.values() for row in rows]
    usage = total_usage(all_rows)
    leads = {
        other.label: lead
        for other, rows in measured
        if other != variant and other.budget == variant.budget and (lead := ahead(_pairs(by_family, rows))) is not None
    }
    return Summary(
        variant=variant,
        length=length,
        question=question,
        families=list(by_family),
        accuracy=Interval.of(
            proportion(
                [answer.value for _, _, answer in flat],
                [(family, row.context) for family, row, _ in flat],
                strata=[family for family, _, _ in flat],
            )
        ),
        ratio=ratio(_pairs(by_family, base)),
        ahead=leads,
        device_share=usage.device / usage.full if usage.full else 0.0,
        moved_per_step=_per_step(usage),
        step_us=timing(all_rows),
    )
