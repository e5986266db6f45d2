"""What the accuracy benchmarks share: the bundled model or another, a grid that resumes, results as JSON, tables as Markdown."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.places import DOCS, RESULTS, ROOT
from semkv.api import compile as compile_model
from semkv.cli.common import progress_bar, quiet_libraries
from semkv.cli.models import BUNDLED, load_model
from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.evaluation import Grid, Report, evaluate
from semkv.evaluation.environment import describe, now
from semkv.evaluation.gain import WINDOW
from semkv.evaluation.identity import subject_identity
from semkv.evaluation.report import build_report
from semkv.evaluation.runner import Refusal
from semkv.evaluation.samples import Sample, make_sample
from semkv.evaluation.schema import Summary
from semkv.evaluation.settings import Variant
from semkv.evaluation.store import RowStore
from semkv.evaluation.tables import percent, provenance
from semkv.evaluation.tasks import build_tasks
from semkv.evaluation.tasks.base import Task
from semkv.profiles.schema import Profile

FAMILIES = ("single", "multi", "confusable", "dense")
LENGTH = 4096
NEEDLES = "niah_single_1,niah_multikey_1,niah_multivalue"
"""Tasks of a model that does not know the bundled families' words."""
NUMBER = re.compile(r"\**([-+]?\d[\d,.]*(e[-+]?\d+)?( (%|B|KiB|MiB|GiB))?( \([^()]*\)| to [\d.]+)?(, [\d.]+)?|-|)\**")
"""A cell that says how much: a number with its unit and interval, a range, or nothing."""
EARLIER = (
    "Measured on an earlier state, in which layers shared one workspace and each could read more than its part of the budget, and "
    "`sketch`, `sekv` and `heterocache` chose otherwise; to be measured again."
)
TIMES = "Measured before codes of `sketch` and `mixed` had their form of today; their lines are to be measured again."
STEPS = "Measured before decode steps became graphs of tensors; to be measured again."
MEASURED_EARLIER = {
    "decode_cpu": STEPS,
    "gpu": STEPS,
    "long_generation": STEPS,
    "peers": EARLIER,
    "profile_resume": TIMES,
    "profiler_memory": TIMES,
    "reports_compresskv": EARLIER,
    "reports_heterocache": EARLIER,
    "reports_sekv": EARLIER,
    "reports_sentencekv": EARLIER,
    "reports_specontext": EARLIER,
    "resident_memory": STEPS,
}
"""Pages that begin with these words: one that is measured again leaves the list."""


def parser(description: str, *, page: bool = False) -> argparse.ArgumentParser:
    """Options that every benchmark has. page: also `--page`, where the page can be made from the committed results."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--samples", type=int, help="questions per family and cell, instead of the published number")
    options.add_argument("--length", type=int, default=LENGTH, help="tokens of context")
    options.add_argument("--families", default=",".join(FAMILIES), help="measure these; others are read from the rows")
    options.add_argument(
        "--rows", type=Path, default=ROOT / "runs", help="folder of the rows that a later run goes on from"
    )
    options.add_argument(
        "--model",
        default=BUNDLED,
        help="another model, with --profile; its results and pages have its name (%(default)s)",
    )
    options.add_argument("--profile", type=Path, help="folder of a profile instead of the committed one")
    options.add_argument("--tasks", default=NEEDLES, help="of another model: needle tasks (%(default)s); '' for none")
    options.add_argument(
        "--answer", type=int, help="of another model: tokens that a needle's answer may have (RULER's)"
    )
    options.add_argument("--going-on", type=int, help="of another model: tokens read behind each text (the task's own)")
    options.add_argument(
        "--source", type=Path, help="of another model: text for recovered gain and perplexity, a file or folder"
    )
    options.add_argument("--haystack", type=Path, help="of another model: text that needles are hidden in")
    options.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes; times of steps are then those of a busy machine (%(default)s)",
    )
    options.add_argument(
        "--together", type=int, default=1, help="contexts answered in the same decode steps (%(default)s)"
    )
    options.add_argument(
        "--contexts", type=int, help="contexts of each time and byte count, instead of the published number"
    )
    options.add_argument("--report-only", action="store_true", help="measure nothing: report what the rows hold so far")
    options.add_argument("--threads", type=int, default=1, help="threads of this process")
    if page:
        options.add_argument(
            "--page", action="store_true", help="write the page alone, from the results that are there"
        )
    return options


class Bench:
    """A model compiled once, the bundled one unless `arguments` name another, with its grids' rows in one file per benchmark.

    name: of results and pages, with the model's where it is another. families, tasks: what its grids ask; another model has needle
    tasks, and with a text `perplexity`, from which recovered gain follows. profile: in place of the one that `arguments` names.
    """

    def __init__(self, name: str, arguments: argparse.Namespace, profile: Profile | None = None):
        quiet_libraries()
        torch.set_num_threads(arguments.threads)
        self.arguments, self.plain_name, self.name = arguments, name, named(name, arguments)
        self.is_bundled = arguments.model == BUNDLED
        self.rows = arguments.rows / f"{self.name}.rows.jsonl"
        loaded = load_model(arguments.model, arguments.profile if profile is None else None)
        self.model, self.tokenizer, self.shown = loaded.model, loaded.tokenizer, loaded.name
        self.profile: Any = loaded.profile if profile is None else profile
        # The weights are stored in float16; so is the KV, or summaries would look cheaper than they are in practice.
        config = CompileConfig(kv_dtype="float16", floor=0)
        method, budget = ("sekv", 0.1) if self.is_bundled else ("full", None)
        self.compiled = compile_model(self.model, self.profile, method=method, budget=budget, config=config)
        self.refused: dict[str, str] = {}
        self._served: dict[str, str] = {}
        self.identify()

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """Of another model, by name."""
        if self.is_bundled:
            return {}
        names = [name for name in self.arguments.tasks.split(",") if name]
        text, haystack = self.arguments.source, self.arguments.haystack
        chat = bool(getattr(self.tokenizer, "chat_template", None))
        answer, going_on = self.arguments.answer, self.arguments.going_on
        options = {name: {"new_tokens": answer} for name in names} if answer else {}
        hidden_in = {} if haystack is None else {"haystack": str(haystack)}
        needles = build_tasks(names, sources=hidden_in, options=options, chat=chat)
        if text is None:
            return needles
        read = {"perplexity": {"tokens": going_on}} if going_on else {}
        return needles | build_tasks(["perplexity"], sources={"text": str(text)}, options=read)

    @property
    def families(self) -> tuple[str, ...]:
        return FAMILIES if self.is_bundled else tuple(self.tasks)

    @property
    def title(self) -> str:
        """What headings call the model."""
        return "the bundled model" if self.is_bundled else self.shown

    def of_bundled(self, *parts: str) -> tuple[str, ...]:
        """Parts of a page that say something of the bundled model alone: none for another."""
        return parts if self.is_bundled else ()

    def lengths(self, wanted: Sequence[int], more: int = 0) -> tuple[int, ...]:
        """Those of `wanted` tokens that the model's context holds with `more` behind them."""
        most = self.compiled.program.max_positions
        return tuple(length for length in wanted if most is None or length + more <= most)

    def sample(self, length: int, index: int = 0, family: str = "dense") -> Sample:
        """A context with a question: of a family, or of another model's first task."""
        if self.is_bundled:
            return make_sample(self.tokenizer, family, length, index, seed=0, questions=1)
        task = next((task for task in self.tasks.values() if task.has_question), None)
        if task is None:
            raise SystemExit("--tasks names no task that asks a question: name one, niah_single_1 for example")
        return task.make(self.tokenizer, length, index, seed=0, questions=1)

    def adapted(self, grid: Grid) -> Grid:
        """A grid of the bundled families as another model's: its tasks, what recovered gain is measured against, and no variant that is
        refused (`refused` says why)."""
        if self.is_bundled:
            return grid
        variants = [variant for variant in grid.variants if self._serves(variant)]
        families = [name for name, task in self.tasks.items() if task.has_question or "seen" not in grid.questions]
        if "perplexity" in families:
            have = {variant.budget for variant in variants if variant.method == WINDOW}
            budgets = dict.fromkeys(variant.budget for variant in variants if variant.budget is not None)
            new = [Variant(method=WINDOW, budget=budget) for budget in budgets if budget not in have]
            variants += [variant for variant in new if self._serves(variant)]
        return grid.model_copy(update={"variants": tuple(variants), "families": tuple(families)})

    def _serves(self, variant: Variant) -> bool:
        return self.serves(variant.method, variant.budget, variant.options, variant.label)

    def serves(self, method: str, budget: float | int | None, options: Mapping[str, Any], label: str = "") -> bool:
        """Whether the profile and a budget are enough for a method at the length that was asked for; where not, `refused` says why."""
        key = json.dumps([method, budget, dict(options)], sort_keys=True, default=str)
        if key not in self._served:
            self._served[key] = self._refusal(method, budget, options)
        if self._served[key]:
            text = Variant(method=method, budget=budget, label=label or method).budget_text
            self.refused[f"{label or method} at {text}"] = self._served[key]
        return not self._served[key]

    def _refusal(self, method: str, budget: float | int | None, options: Mapping[str, Any]) -> str:
        """Why a method is refused; empty where it is not."""
        try:
            made = self.compiled.with_method(method, budget, config=self.compiled.settings, **options).placement
        except (BudgetError, ConfigError) as error:
            return str(error)
        enough = made.budget.average_tokens(self.arguments.length) >= made.minimum_tokens
        return "" if enough else "fewer tokens than the method needs"

    def left_out(self) -> tuple[str, ...]:
        """A paragraph on variants that were refused."""
        listed = "; ".join(f"{name} ({why})" for name, why in self.refused.items())
        return (f"Left out: {listed}.",) if listed else ()

    def identify(self) -> None:
        """Tie the rows that follow to the model's weights as they are now."""
        self.identity = subject_identity(self.model, self.profile, None, self.compiled.placement.budget.dtype)

    def run(
        self, grid: Grid, title: str, tasks: Mapping[str, Task] | None = None, refusals: list[Refusal] | None = None
    ) -> Report:
        """Measure what the chosen families lack, then report on everything that the rows hold of the grid.

        tasks: what names in `grid.families` stand for that are not bundled families; they are measured beside any of those.
        refusals: as in `evaluate`.
        """
        if tasks is None and not self.is_bundled:
            grid, tasks = self.adapted(grid), self.tasks
            refusals = [] if refusals is None else refusals
        asked = self.arguments.families.split(",")
        chosen = tuple(family for family in grid.families if family in asked or family in (tasks or {}))
        if self.arguments.report_only:
            return self.report(grid, title, tasks)
        with progress_bar(title) as progress:
            report = evaluate(
                self.compiled,
                self.tokenizer,
                grid.model_copy(update={"families": chosen}),
                identity=self.identity,
                model=self.shown,
                title=title,
                rows=self.rows,
                progress=progress,
                tasks=tasks,
                workers=self.arguments.workers,
                together=self.arguments.together,
                refusals=refusals,
            )
        if not report.complete:
            raise SystemExit("stopped before it was complete; run the same command to go on")
        if refusals and not self.is_bundled:
            gone = [refusal.variant for refusal in refusals]
            self.refused |= {f"{one.variant.label} at {one.variant.budget_text}": one.why for one in refusals}
            grid = grid.model_copy(update={"variants": tuple(one for one in grid.variants if one not in gone)})
        return build_report(
            grid,
            self.identity,
            RowStore(self.rows),
            report.environment,
            title=title,
            model=self.shown,
            notes=report.notes,
            tasks=tasks,
        )

    def report(self, grid: Grid, title: str, tasks: Mapping[str, Task] | None = None) -> Report:
        """What the rows hold of `grid`."""
        return build_report(
            grid, self.identity, RowStore(self.rows), describe(now()), title=title, model=self.shown, tasks=tasks
        )


def named(name: str, arguments: argparse.Namespace) -> str:
    """The name of a benchmark's results and page: with the model's, where that is not the bundled one."""
    if arguments.model == BUNDLED:
        return name
    return f"{name}_{re.sub(r'[^a-z0-9]+', '_', Path(arguments.model).name.split('.')[0].lower())}"


def lean(report: Report, ahead: Collection[str] = ()) -> Report:
    """A report without what no table reads: counts by head and depth, parameters that follow from a variant's options and the commit, and
    changes against other variants, but for those of the labels `ahead`."""
    gone = {"zoom": None, "mass": None, "depths": []}
    cells = [
        cell.model_copy(update=gone | {"cell": cell.cell.model_copy(update={"parameters": {}})})
        for cell in report.cells
    ]
    summaries = [x if x.variant.label in ahead else x.model_copy(update={"ahead": {}}) for x in report.summaries]
    return report.model_copy(update={"cells": cells, "summaries": summaries})


def as_text(content: Any) -> str:
    """Results as JSON: each number with the six digits that a measurement has at most, each item of a list on a line of its own."""

    def rounded(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: rounded(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [rounded(value) for value in x]
        return float(f"{x:.6g}") if isinstance(x, float) else x

    def lines(x: Any) -> str:
        if isinstance(x, dict) and any(isinstance(value, dict | list) for value in x.values()):
            return "{" + ",".join(f"\n{json.dumps(key)}: {lines(value)}" for key, value in x.items()) + "\n}"
        if isinstance(x, list) and any(isinstance(value, dict | list) for value in x):
            return "[" + ",".join(f"\n {json.dumps(value)}" for value in x) + "\n]"
        return json.dumps(x)

    return lines(rounded(content)) + "\n"


def write_results(name: str, report: Report) -> None:
    """`benchmarks/results/NAME.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(as_text(report.model_dump(mode="json")), encoding="utf-8")


def read_results(name: str) -> Report:
    """What `write_results` wrote."""
    return Report.model_validate_json(json_of(name).read_text(encoding="utf-8"))


def read_parts(name: str) -> dict[str, Any]:
    """What a script with several parts wrote, its reports as such under `reports`."""
    found = json.loads(json_of(name).read_text(encoding="utf-8"))
    return found | {"reports": {part: Report.model_validate(of) for part, of in found.get("reports", {}).items()}}


def json_of(name: str) -> Path:
    """Where the results of this name are; exits where there are none."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"{path} is missing: run the script without --page, which measures and writes it")
    return path


def write_document(name: str, *parts: str) -> Path:
    """`docs/results/NAME.md` from paragraphs and tables, the title first."""
    if name in MEASURED_EARLIER:
        parts = (parts[0], MEASURED_EARLIER[name], *parts[1:])
    DOCS.mkdir(parents=True, exist_ok=True)
    path = DOCS / f"{name}.md"
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    return path


def measured_on(environment: dict[str, Any]) -> str:
    """One paragraph: machine, threads, versions, commit, date and command of a `semkv.evaluation.environment.describe` in JSON."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['machine']}, {environment['threads']} threads of {environment['cpus']} cores; {versions}; "
        f"commit {environment['commit']}; {environment['started']}. Command: `{environment['command']}`."
    )


def provenance_of(shown: Report, *others: Report, figures: bool = False) -> str:
    """The provenance of `shown`, with the commits of every report that a page has figures of. figures: it has others as well."""
    commits = sorted({commit for report in (shown, *others) for commit in report.commits})
    complete = all(report.complete for report in (shown, *others))
    text = provenance(shown.model_copy(update={"commits": commits, "complete": complete}))
    if not figures:
        return text
    written = sorted({report.environment.commit for report in (shown, *others)})
    return (
        f"{text} Figures that are no cells of a grid, such as times and memory by length, have no commit of their own; the file that "
        f"they are in was written at {', '.join(written)}."
    )


def table(columns: list[str], lines: list[list[str]]) -> str:
    """A Markdown table: the first column and those of words left-aligned, those of numbers right-aligned."""
    numbers = [all(NUMBER.fullmatch(line[place]) for line in lines) for place in range(1, len(columns))]
    rule = "|" + "|".join([" --- ", *[" ---: " if number else " --- " for number in numbers]]) + "|"
    return "\n".join(["| " + " | ".join(columns) + " |", rule, *["| " + " | ".join(line) + " |" for line in lines]])


def at_a_glance(report: Report, nowhere: Sequence[str] = ()) -> str:
    """A line per method, a column per budget, the best first: exact answers in percent, with their intervals.

    nowhere: labels of methods that ran at no budget, last.
    """
    budgets = sorted({s.variant.budget for s in report.summaries if isinstance(s.variant.budget, float)})
    found: dict[str, dict[float, Summary]] = {}
    for summary in report.summaries:
        if isinstance(summary.variant.budget, float):
            found.setdefault(summary.variant.label, {})[summary.variant.budget] = summary
    full = next(s for s in report.summaries if s.variant.budget is None)

    def coded(label: str) -> str:
        name, _, form = label.partition(", ")
        return f"`{name}`" + (f", {form}" if form else "")

    def merit(label: str) -> tuple[float, int]:
        """Budgets at which a method does not run count as nothing."""
        return -sum(s.accuracy.value for s in found[label].values()), list(found).index(label)

    lines = [["`full`", *[percent(full.accuracy)] * len(budgets)]]
    for label in sorted(found, key=merit):
        cells = [percent(found[label][b].accuracy) if b in found[label] else "-" for b in budgets]
        lines.append([coded(label), *cells])
    lines += [[coded(label), *["-"] * len(budgets)] for label in nowhere]
    return table(["method", *[f"{100 * budget:g} %" for budget in budgets]], lines)
