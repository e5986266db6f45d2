"""Whether HeteroCache's calibration transfers: satellites that two sources share, and the scores under the roles of each.

Parts of `reports_heterocache.py`, which runs them (App. C.4 and Table 5 of the paper).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.claims import EQUAL, WAYS, verdict
from benchmarks.lib.grids import Bench, table
from benchmarks.quality.quality import points
from semkv.cli.profile import BUNDLED_MEASURES
from semkv.evaluation import Grid, Report
from semkv.evaluation.report import Pairs, ahead
from semkv.evaluation.runner import all_tasks, cell_of, plan_of
from semkv.evaluation.schema import Interval
from semkv.evaluation.statistics import proportion
from semkv.evaluation.store import RowStore
from semkv.evaluation.tables import percent
from semkv.methods import find_method
from semkv.profiles.calibration import (
    CalibrationSettings,
    Job,
    MeasureData,
    MeasureSettings,
    bundled_measure_data,
    run_steps,
    text_measure_data,
)
from semkv.profiles.schema import Profile

SIMILAR = (0.2, 0.28, 0.5)
"""Thresholds of similarity at which satellites are counted; the last is the paper's."""
ALWAYS = 0.001
"""A tau_stable that every head reaches, so that only pivots are whole."""
AGAIN = 0.8
"""More than this share of the satellites the paper finds again (App. C.4)."""


def roles_of(profile: Profile, stable: float, similar: float) -> tuple[tuple[str, ...], ...]:
    """Roles per layer and KV head at these thresholds."""
    return find_method("heterocache", {"tau_stable": stable, "tau_similar": similar}).taxonomy(profile)[0]


def sources(bench: Bench, texts: list[Path], settings: MeasureSettings) -> dict[str, MeasureData]:
    """Two calibration sources by name."""
    if texts:
        return {path.stem: text_measure_data([path], bench.tokenizer, settings) for path in texts}
    data = bundled_measure_data(bench.tokenizer, settings)
    prose = tuple(one for one in data.sets if one.name == "prose")
    tasks = tuple(one for one in data.sets if one.name != "prose")
    each = sum(len(one.measured) for one in tasks) // len(tasks)
    return {
        "prose": replace(data, sets=prose, needles=(), description="prose"),
        "haystacks": replace(data, sets=tasks, needles=(), description=f"haystacks, {each} of each family"),
    }


def calibrated(bench: Bench, name: str, data: MeasureData, settings: MeasureSettings, rows: Path) -> Profile:
    """The benchmark's profile with the taxonomy of one source, made once."""
    folder = rows / f"{bench.name}.{name}.{data.digest()[:12]}.{settings.identity()[:12]}"
    if not folder.is_dir():
        job = Job(bench.model, bench.shown, bench.name, None, CalibrationSettings(), data, settings)
        run_steps(job, ["taxonomy"], profile=bench.profile).profile.save(folder)
    return Profile.load(folder)


def overlaps(first: Profile, second: Profile) -> list[dict[str, Any]]:
    """How many satellites each of two sources finds, and both (App. C.4)."""
    found = []
    for similar in SIMILAR:
        sets = [
            {
                (layer, head)
                for layer, row in enumerate(roles_of(one, ALWAYS, similar))
                for head, r in enumerate(row)
                if r == "satellite"
            }
            for one in (first, second)
        ]
        heads = sum(len(row) for row in first.info.head_taxonomy.roles)
        found.append(
            {
                "tau_similar": similar,
                "satellites": [len(one) for one in sets],
                "both": len(sets[0] & sets[1]),
                "heads": heads,
            }
        )
    return found


def overlap_table(found: list[dict[str, Any]], names: list[str]) -> str:
    """Satellites that both sources find, over the smaller and the larger set, beside what two random sets of these sizes would share."""
    lines = []
    for one in found:
        few, many = sorted(one["satellites"])
        over = [f"{100 * one['both'] / count:.0f}" if count else "-" for count in (few, many)]
        chance = [f"{100 * count / one['heads']:.0f}" if few else "-" for count in (many, few)]
        verdicts = [seen_again(one["both"], few), seen_again(one["both"], many)]
        lines.append(
            [
                f"{one['tau_similar']:g}",
                *map(str, one["satellites"]),
                str(one["both"]),
                over[0],
                chance[0],
                over[1],
                chance[1],
                verdicts[0] if verdicts[0] == verdicts[1] else f"{verdicts[0]}, by the larger {verdicts[1]}",
            ]
        )
    columns = [
        "tau_sim",
        *(f"satellites, {name}" for name in names),
        "both",
        "of the smaller set, %",
        "by chance, %",
        "of the larger set, %",
        "by chance, %",
        "seen here",
    ]
    return table(columns, lines)


def seen_again(both: int, of: int) -> str:
    """Whether a set's satellites are found again, by the interval of their share over heads."""
    if not of:
        return verdict(None)
    return verdict(Interval.of(proportion([place < both for place in range(of)], range(of))), low=AGAIN)


def transfer_table(reports: Mapping[str, Report], change: Mapping[str, Any] | None) -> str:
    """Accuracy under the roles of each source (Table 5), and the change from one to the other on the same questions."""
    lines = []
    for name, report in reports.items():
        for summary in report.summaries:
            if summary.variant.method == "heterocache":
                shown = [name, summary.variant.label, summary.variant.budget_text, percent(summary.accuracy)]
                lines.append([*shown, str(summary.accuracy.samples)])
    scores = table(["calibrated on", "variant", "budget", "mean, %", "questions"], lines)
    if change is None:
        return scores
    found = Interval.model_validate(change)
    return (
        f"{scores}\n\nScores of both are equal, within {100 * EQUAL:g} points on the same questions: {points(found)}, "
        f"{verdict(found, *WAYS['equal'])}."
    )


def change_between(first: Bench, second: Bench, grid: Grid) -> Interval | None:
    """How much more of the same questions the second answers, of the variants of `grid` that compress."""
    first_grid, known = first.adapted(grid), all_tasks(first.tasks)
    store = RowStore(first.rows)
    pairs: Pairs = []
    for variant in (one for one in first_grid.variants if one.method == "heterocache"):
        for family, length, question in itertools.product(first_grid.families, grid.lengths, grid.questions):
            task = first.tasks.get(family)
            contexts = range(plan_of(grid, task).contexts)
            mine, theirs = (
                {
                    row.context: row
                    for row in store.rows(
                        cell_of(grid, one.identity, variant, family, length, question, known.get(family)).key, contexts
                    )
                }
                for one in (second, first)
            )
            pairs += [(family, row, theirs[at]) for at, row in mine.items() if at in theirs and not row.answers[0].nats]
    return ahead(pairs)


def transfer(
    arguments: argparse.Namespace, bench: Bench, scored: Grid
) -> tuple[list[dict[str, Any]], dict[str, Report], dict[str, Any] | None]:
    """Satellites that two sources share, what `scored` gives under the roles of each, and the change from the first to the second."""
    settings = MeasureSettings.checked(**(BUNDLED_MEASURES if bench.is_bundled else {}))
    data = sources(bench, arguments.text, settings)
    profiles = {name: calibrated(bench, name, one, settings, arguments.rows) for name, one in data.items()}
    benches = {name: Bench(bench.plain_name, arguments, profile) for name, profile in profiles.items()}
    reports = {name: one.run(scored, f"Calibrated on {name}") for name, one in benches.items()}
    change = change_between(*benches.values(), scored)
    return overlaps(*profiles.values()), reports, None if change is None else change.model_dump()
