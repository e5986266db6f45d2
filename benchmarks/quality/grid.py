"""Every method on the bundled model: which keeps the answers, at which budget, length, and with the question seen or not.

    python -m benchmarks.quality.grid                     # about 2 hours of one core; stops and goes on anywhere
    python -m benchmarks.quality.grid --families dense    # one family, as one of several processes that share the rows
    python -m benchmarks.quality.grid --report-only       # what the rows hold so far
    python -m benchmarks.quality.grid --page              # the page alone, from the results and the rows that are there

Two processes on two cores take about half as long; run it once more alone when both are done, for the report.

Three parts, each a JSON in benchmarks/results/: `grid` (4K tokens, question unseen, 3, 5, 10 and 20 %, 50 questions a cell),
`grid_leaders` (the same at 3, 5 and 10 % with 200 questions for `auto`, `mixed`, `sketch`, the five systems, the best
baseline and the ceiling) and `grid_settings` (2K and 8K tokens, and the question seen, at 10 %). Writes docs/results/grid.md.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.lib.grids import (
    FAMILIES,
    LENGTH,
    Bench,
    at_a_glance,
    lean,
    parser,
    provenance_of,
    read_results,
    table,
    write_document,
    write_results,
)
from benchmarks.lib.places import DOCS, RESULTS, ROOT
from benchmarks.quality.quality import points
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.fitting import which_fit
from semkv.evaluation.plots import accuracy_by_budget, draw_all
from semkv.evaluation.runner import Refusal, Work, missing_work
from semkv.evaluation.schema import Interval, Row, Summary
from semkv.evaluation.settings import build_variants, settle_auto
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import Subject
from semkv.evaluation.tables import markdown, percent
from semkv.methods.auto import AUTO

SPARSE = ("single", "multi", "confusable")
BUDGETS = (0.03, 0.05, 0.1, 0.2)
TIGHT = (0.03, 0.05, 0.1)
BARS = {0.1: (0.99, 0.95), 0.05: (0.97, 0.88), 0.03: (0.94, 0.75)}
"""By budget: what `auto` has to keep of the full cache's answers, mean of the sparse families and in the dense haystack."""

SYSTEMS = ("sekv", "heterocache", "sentencekv", "compresskv", "specontext")
OURS = ("mixed", "sketch")
BASELINES = (
    "streaming_llm",
    "h2o",
    "snapkv",
    "pyramidkv",
    "chunkkv",
    "cake",
    "semanticache",
    "quest",
    "shadowkv",
    "omnikv",
    "infllm",
    "clusterkv",
)
FORMS: dict[str, dict[str, dict[str, object]]] = {
    "heterocache": {"heterocache, strict": {"strict": True}},
    "omnikv": {"omnikv, strict": {"strict": True}},
    "specontext": {"specontext, strict": {"strict": True}},
    "compresskv": {"compresskv, recoverable": {"recoverable": True}},
    "sentencekv": {"sentencekv, recoverable": {"recoverable": True}},
}
"""Beside the paper's form of a method, which drops tokens or needs much room, ours."""
CEILING = "ceiling"
RIVALS = {
    "sekv": ("streaming_llm", "h2o", "snapkv", "pyramidkv", "chunkkv", "semanticache", "sentencekv"),
    "heterocache": ("cake", "quest", "shadowkv", "omnikv"),
    "sentencekv": ("h2o", "snapkv", "quest", "shadowkv", "infllm"),
    "compresskv": ("streaming_llm", "snapkv", "pyramidkv", "cake"),
    "specontext": ("quest", "shadowkv", "clusterkv"),
}
"""The methods that each system's own paper compares it with."""
COMPARED = {label for system in RIVALS for label in (system, *FORMS.get(system, {}))}


SHOWN = (
    "full",
    AUTO,
    "specontext, strict",
    "sekv",
    "quest",
    "compresskv, recoverable",
    "heterocache, strict",
    "sentencekv, recoverable",
    "snapkv",
)
"""Methods in the picture: more than these cannot be told apart."""
REFUSED = "grid_refused.json"
NOTES = ROOT / "benchmarks" / "quality" / "grid_notes.md"
"""Why a system is below what its paper compares it with: words by hand, figures in braces by `notes`."""
HOURS = "about 2 h with one process, 1 h with two on two cores"
"""From empty rows, on the machine of the recorded run."""
ROW_SECONDS = 0.5
"""By those, of a row at `LENGTH` tokens."""


def place(variant: Variant) -> str:
    """What `grid_refused.json` calls a variant."""
    return f"{variant.label} at {variant.budget_text}"


@dataclass(frozen=True)
class Part:
    """One grid: which methods at which budgets, and on what."""

    name: str
    title: str
    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    samples: int
    length: int = LENGTH
    question: str = "unseen"

    def variants(self) -> tuple[Variant, ...]:
        made = [Variant(method="full")]
        for budget in self.budgets:
            for name in self.methods:
                if name == CEILING:
                    made.append(Variant(method="sketch", budget=budget, options={"oracle": True}, label=CEILING))
                    continue
                made.append(Variant(method=name, budget=budget))
                for label, options in FORMS.get(name, {}).items():
                    made.append(Variant(method=name, budget=budget, options=options, label=label))
        return tuple(made)

    def grid(self, families: tuple[str, ...] = FAMILIES) -> Grid:
        return Grid(
            variants=self.variants(),
            families=families,
            lengths=(self.length,),
            questions=(self.question,),
            samples=self.samples,
            questions_per_context=4,
        )


def best_baselines(report: Report) -> tuple[str, ...]:
    """The baselines with the best mean over the tight budgets: in its paper's form, and in any form."""

    def score(label: str) -> float:
        found = [s for s in report.summaries if s.variant.label == label and s.variant.budget in TIGHT]
        return sum(s.accuracy.value for s in found)

    own = max(BASELINES, key=score)
    any_form = max(BASELINES, key=lambda name: max(map(score, (name, *FORMS.get(name, {})))))
    return tuple(dict.fromkeys((own, any_form)))


class Measuring:
    """Runs parts, leaving out what cannot run, and reports on them with `auto` beside the method that it takes."""

    def __init__(self, arguments) -> None:
        self.bench = Bench("grid", arguments)
        self.arguments = arguments
        self.subject = Subject(self.bench.compiled, self.bench.identity)
        kept = RESULTS / REFUSED
        self.refused: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else {}

    def grid(self, part: Part) -> Grid:
        """The part's grid, with as many questions as were asked for."""
        asked = self.arguments.samples
        return part.grid() if not asked else part.grid().model_copy(update={"samples": min(part.samples, asked)})

    def hours(self, parts: Iterable[Part]) -> float:
        """What measuring the rows that are missing will take, by `ROW_SECONDS`."""
        found = ((part, self.missing(self.fitting(part, self.grid(part)))) for part in parts)
        seconds = sum(len(work.variants) * ROW_SECONDS * part.length / LENGTH for part, left in found for work in left)
        return seconds / 3600

    def missing(self, grid: Grid) -> list[Work]:
        """What the chosen families lack of `grid`, in the order in which it is measured."""
        asked = self.arguments.families.split(",")
        chosen = grid.model_copy(update={"families": tuple(f for f in grid.families if f in asked)})
        return missing_work(chosen, self.bench.identity, RowStore(self.bench.rows))

    def run(self, part: Part) -> Report:
        grid = self.grid(part)
        if not (self.arguments.report_only and part.name in self.refused):
            refused = which_fit(self.subject, self.bench.tokenizer, grid)[1]
            self.refused[part.name] = {place(variant): why for variant, why in refused}
        grid = self.fitting(part, grid)
        if not self.arguments.report_only:
            grid = self.measure(part, grid)
        return self.report(grid, part.title)

    def fitting(self, part: Part, grid: Grid) -> Grid:
        """`grid` without the variants that the part has refused so far."""
        refused = self.refused.get(part.name, {})
        fitting = tuple(v for v in grid.variants if place(v) not in refused)
        return grid.model_copy(update={"variants": fitting})

    def measure(self, part: Part, grid: Grid) -> Grid:
        """Measure `grid` and return what of it runs: a variant that a later context refuses is left out, with that context's reason."""
        refusals: list[Refusal] = []
        self.bench.run(grid, part.title, refusals=refusals)
        self.refused[part.name] |= {place(refusal.variant): refusal.why for refusal in refusals}
        return self.fitting(part, grid)

    def report(self, grid: Grid, title: str) -> Report:
        """What the rows hold of `grid`; `auto` has the rows of the method that the profile chooses at the budget."""
        ran = {(v.method, v.budget) for v in grid.variants if not v.options}
        asked = build_variants([AUTO], [v.budget for v in grid.variants if v.budget is not None])
        chosen = [v for v in settle_auto(asked, self.bench.profile) if (v.method, v.budget) in ran]
        return self.bench.report(grid.model_copy(update={"variants": (*grid.variants, *chosen)}), title)

    def kept(self, part: Part, families: tuple[str, ...]) -> dict[tuple[str, float], Summary]:
        """Summaries over some of the families, by label and budget."""
        report = self.report(part.grid(families), part.title)
        return {(s.variant.label, s.variant.budget): s for s in report.summaries if isinstance(s.variant.budget, float)}


def pictures_of(methods: Report, leaders: Report, sites: int) -> list[Path]:
    """Accuracy by budget of a few methods, needles by depth, and what our own mixtures unfold of a model with so many attentions."""
    few = methods.model_copy(
        update={
            "cells": [c for c in methods.cells if c.cell.variant.label in SHOWN],
            "summaries": [s for s in methods.summaries if s.variant.label in SHOWN],
        }
    )
    zooms = tuple(f"zoom_{label}_" for label in OURS)  # of sekv, thresholds decide in reports_sekv.py
    others = []
    for picture in draw_all(leaders, DOCS / "grid", sites):
        if picture.stem.startswith(("needles", *zooms)):
            others.append(picture)
        else:
            picture.unlink()
    accuracy = accuracy_by_budget(few, "unseen", LENGTH, DOCS / "grid" / f"accuracy_unseen_{LENGTH}.png")
    return others if accuracy is None else [accuracy, *others]


def bars(measuring: Measuring, part: Part) -> str:
    """`auto` against its bars, and beside the ceiling."""
    sparse, dense = measuring.kept(part, SPARSE), measuring.kept(part, ("dense",))
    lines = []
    for budget, (least, least_dense) in BARS.items():
        mine, haystack = sparse.get((AUTO, budget)), dense.get((AUTO, budget))
        if mine is None or haystack is None or mine.ratio is None or haystack.ratio is None:
            continue
        top, top_dense = sparse.get((CEILING, budget)), dense.get((CEILING, budget))
        lines.append(
            [
                f"{100 * budget:g} %",
                mine.variant.method,
                percent(mine.ratio),
                f"{100 * least:.0f}",
                percent(top.ratio) if top else "-",
                percent(haystack.ratio),
                f"{100 * least_dense:.0f}",
                percent(top_dense.ratio) if top_dense else "-",
                "yes" if mine.ratio.value >= least and haystack.ratio.value >= least_dense else "no",
            ]
        )
    return table(
        ["budget", "auto takes", "sparse, % of full", "bar", "ceiling", "dense, % of full", "bar", "ceiling", "met"],
        lines,
    )


def leads(report: Report, label: str, system: str) -> dict[str, dict[float, Interval]]:
    """How far `label` is ahead of every rival of `system`, by rival and budget, where both run.

    A rival that runs at none of the budgets is met in its capped form.
    """
    found = {s.variant.budget: s for s in report.summaries if s.variant.label == label and s.variant.budget in BUDGETS}
    forms = (form for name in RIVALS[system] for form in (name, *FORMS.get(name, {})))
    ahead = {other: {b: found[b].ahead[other] for b in sorted(found) if other in found[b].ahead} for other in forms}
    return {other: of for other, of in ahead.items() if of}


def mean_leads(ahead: dict[str, dict[float, Interval]]) -> dict[float, float]:
    """The mean over the rivals that run at a budget, in points, by budget."""
    budgets = sorted({budget for of in ahead.values() for budget in of})
    return {b: 100 * mean(of[b].value for of in ahead.values() if b in of) for b in budgets}


def rivals(report: Report) -> str:
    """Each system's lead over what its paper compares it with, at the budgets at which both run."""
    lines = []
    for system in RIVALS:
        for label in (system, *FORMS.get(system, {})):
            ahead = leads(report, label, system)
            means = {other: 100 * mean(lead.value for lead in of.values()) for other, of in ahead.items()}
            for other, of in ahead.items():
                each = ", ".join(f"{100 * b:g} %: {points(lead)}" for b, lead in of.items())
                lines.append([label, other, f"{means[other]:+.1f}", each])
            if means:
                each = ", ".join(f"{100 * b:g} %: {lead:+.1f}" for b, lead in mean_leads(ahead).items())
                lines.append([f"**{label}**", "their mean", f"**{mean(means.values()):+.1f}**", each])
    return table(["system", "against", "points ahead, mean", "by budget"], lines)


def beaten(report: Report) -> str:
    """Where another method answers more than `auto`, beyond the interval."""
    worse = []
    for s in report.summaries:
        if s.variant.label == AUTO:
            for other, lead in s.ahead.items():
                if other != CEILING and lead.high is not None and lead.high < 0:
                    worse.append(f"{other} at {s.variant.budget_text} ({points(lead)})")
    return (
        "`auto` is below " + ", ".join(worse) + "."
        if worse
        else "No single method is ahead of `auto` beyond the interval."
    )


def refusals(refused: dict[str, dict[str, str]], parts: Iterable[Part]) -> str:
    """What did not run, part by part, and why."""
    lines = [[part.title, *pair] for part in parts for pair in refused.get(part.name, {}).items()]
    return table(["part", "method and budget", "why"], lines)


def nowhere(part: Part, report: Report) -> list[str]:
    """Labels of the part's variants that ran at no budget."""
    ran = {s.variant.label for s in report.summaries}
    return list(dict.fromkeys(v.label for v in part.variants() if v.label not in ran))


def notes(report: Report) -> str:
    """The notes with their figures: `{answers[LABEL at BUDGET]}` in percent, `{ahead[LABEL at BUDGET]}` points ahead of the mean of the
    rivals."""
    unknown = "(not measured)"
    answers: dict[str, str] = defaultdict(lambda: unknown)
    ahead: dict[str, str] = defaultdict(lambda: unknown)
    for system in RIVALS:
        for label in (system, *FORMS.get(system, {})):
            for budget, lead in mean_leads(leads(report, label, system)).items():
                ahead[f"{label} at {100 * budget:g} %"] = f"{lead:+.0f}"
    for summary in report.summaries:
        answers[place(summary.variant)] = f"{100 * summary.accuracy.value:.0f}"
    return NOTES.read_text(encoding="utf-8").format(answers=answers, ahead=ahead)


def effort(rows: Path) -> str:
    """How long the whole takes, beside what the clocks of the rows in this file say."""
    whole = f"From empty rows the whole takes {HOURS} on the machine of the recorded run."
    if not rows.is_file():
        return whole
    found = [Row.model_validate_json(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    seconds = 1e-6 * sum(row.compress_us + sum(row.step_us) for row in found)
    return (
        f"{whole} Of one core's time {seconds / 3600:.1f} h were compression and decode steps, by the clocks of the {len(found):,} rows, "
        "those of [the comparison with kvpress](peers.md) among them; the rest is reading contexts and questions."
    )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], page=True).parse_args()
    measuring = Measuring(arguments)
    everyone = (*OURS, *SYSTEMS, *BASELINES)
    first = Part("grid", "All methods", everyone, BUDGETS, 50)
    settings = [
        Part("grid_2k", "2K tokens", everyone, (0.1,), 50, length=2048),
        Part("grid_8k", "8K tokens", everyone, (0.1,), 50, length=8192),
        Part("grid_seen", "Question seen", everyone, (0.1,), 50, question="seen"),
    ]

    def leading(methods: Report) -> Part:
        return Part("grid_leaders", "Leaders", (*OURS, *SYSTEMS, *best_baselines(methods), CEILING), TIGHT, 200)

    if arguments.page:
        methods = read_results(first.name)
        leaders = leading(methods)
        reports = {part.name: read_results(part.name) for part in (leaders, *settings)} | {first.name: methods}
    else:
        if not arguments.report_only:
            known = measuring.report(measuring.grid(first), first.title)
            left = measuring.hours((first, leading(known), *settings))
            print(f"about {left:.1f} h of one core left, on a machine that takes {ROW_SECONDS} s a row", flush=True)
        methods = measuring.run(first)
        leaders = leading(methods)
        reports = {part.name: measuring.run(part) for part in (leaders, *settings)} | {first.name: methods}
        for name, report in reports.items():
            if report.cells:
                write_results(name, report if name == leaders.name else lean(report, COMPARED))
        (RESULTS / REFUSED).write_text(json.dumps(measuring.refused, indent=1) + "\n", encoding="utf-8")
    pictures = pictures_of(methods, reports["grid_leaders"], len(measuring.bench.compiled.program.stores))
    path = write_document(
        "grid",
        "# All methods on the bundled model",
        "Made by `benchmarks/quality/grid.py`. 4K tokens and the question asked after compression, where nothing else is said. `auto` is "
        "the method that the profile's own measurement, on other contexts, chooses at the budget. The ceiling is the sketch with true "
        "attention in place of its codes, which cost nothing there: the same heads with the same budgets.",
        "## The bars",
        "Set before anything was measured: percent of the full cache's answers that `auto` keeps.",
        bars(measuring, leaders),
        beaten(reports["grid_leaders"]),
        "## All methods at a glance",
        "Exact answers in percent over the four families, 50 questions each; in brackets 95 % intervals, clustered by "
        "context. A budget below a method's smallest, or with no room to unfold anything, has a dash. `strict` and `recoverable` are "
        "our forms of methods that "
        "need more room or drop tokens.",
        at_a_glance(methods, nowhere(first, methods)),
        "## Leaders, 200 questions a cell",
        markdown(reports["grid_leaders"]),
        "\n\n".join(f"![{picture.stem.replace('_', ' ')}](grid/{picture.name})" for picture in pictures),
        "## All methods, 50 questions a cell",
        markdown(methods),
        "Cells that are missing, here and in the other parts of this page, and what the method says:",
        refusals(measuring.refused, (first, leaders, *settings)),
        "## The systems against what their papers compare them with",
        rivals(methods),
        notes(methods),
        "## Other lengths, and the question seen",
        *[markdown(reports[p.name]) if reports[p.name].cells else f"{p.title}: not measured yet." for p in settings],
        "## Provenance",
        provenance_of(methods, *reports.values()),
        effort(measuring.bench.rows),
        ""
        if all(report.complete for report in reports.values())
        else "Not complete: the tables tell how many questions each line has.",
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
