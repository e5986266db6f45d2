"""The five systems on a real model, as their papers have them and within our budget, beside the methods that they compare with.

    python -m benchmarks.quality.systems --model MODEL --profile FOLDER --source TEXTS                 # an interrupted run goes on
    python -m benchmarks.quality.systems --model MODEL --profile FOLDER --source TEXTS --budgets 0.1   # the others stay as they are
    python -m benchmarks.quality.systems --model MODEL --profile FOLDER --source TEXTS --modes         # without the switches of parts
    python -m benchmarks.quality.systems --model MODEL --profile FOLDER --page                         # the page alone, from the results

Every system at 5, 10, 20 and 50 %: needles, asked after compression and before it, and the recovered gain of ordinary text. Then
what each paper says of its parts, one switch at a time, paired on the same questions and texts. Writes
benchmarks/results/systems_MODEL.json, budget by budget, and docs/results/systems_MODEL.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.claims import WAYS, verdict, write_parts
from benchmarks.lib.grids import Bench, lean, parser, provenance_of, read_parts, table, write_document
from benchmarks.lib.places import RESULTS
from benchmarks.quality.quality import points
from benchmarks.quality.real import GAIN, gained
from benchmarks.quality.systems_said import (
    BUDGETS,
    CHUNK,
    MODES,
    SAID,
    SWITCHED,
    SWITCHED_LINES,
    WHOLE,
    WHOLE_LINES,
    Said,
    variants,
)
from semkv.cli.common import budgets as shares
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.gain import WINDOW, gain_change
from semkv.evaluation.runner import Refusal, cell_of, plan_of
from semkv.evaluation.schema import Interval, Row
from semkv.evaluation.settings import QuestionMode
from semkv.evaluation.store import RowStore
from semkv.evaluation.tables import percent

NAME = "systems"
LENGTH, SAMPLES, TEXTS = 2048, 8, 16
"""Tokens of a context, questions of a needle task, and texts; other numbers of both with --samples."""
ANSWER, GOING_ON = 32, 64
"""Tokens that an answer, which begins with the number where it was found, may have, and that are read behind a text."""
TOGETHER = 16
"""Contexts whose answers run in the same steps."""
TEXT = "perplexity"


def at(grid: Grid, budget: float) -> Grid:
    """A grid's variants of one budget, with `full`."""
    return grid.model_copy(update={"variants": tuple(v for v in grid.variants if v.budget in (None, budget))})


SAME = (
    " Where gain differs by exactly 0.0, both sides keep the same memory: the budget raises SeKV's alpha until the anchors fit and "
    "shortens its window, so neither acts at a budget that is this tight; thresholds between which no head lies do not act either."
)
"""Of switches that switch nothing at a budget."""


class Systems:
    """The three grids of some budgets, and what follows from their rows: of each budget a report of each, and the changes."""

    def __init__(self, bench: Bench, questions: int, texts: int, budgets: Sequence[float], *, modes: bool = False):
        self.bench, self.budgets, length = bench, budgets, bench.arguments.length
        needles = {name: task for name, task in bench.tasks.items() if task.has_question}
        if TEXT not in bench.tasks or not needles:
            raise SystemExit("--source with texts and --tasks with a needle task are needed")
        sentences = bench.profile.info.sentences
        chunk = CHUNK if sentences is None else round(sentences.mean_tokens)
        served = {
            question: tuple(
                v
                for v in variants(question, chunk, budgets, modes=modes)
                if v.budget is None or bench.serves(v.method, v.budget, v.options, v.label)
            )
            for question in ("unseen", "seen")
        }
        parts: tuple[tuple[str, QuestionMode, tuple[str, ...], int], ...] = (
            ("text", "unseen", (TEXT,), texts),
            ("unseen", "unseen", tuple(needles), questions),
            ("seen", "seen", tuple(needles), questions),
        )
        self.grids = {
            name: Grid(
                variants=served[question],
                families=families,
                lengths=(length,),
                samples=samples,
                questions=(question,),
                questions_per_context=1,
            )
            for name, question, families, samples in parts
        }
        self.reports: dict[str, Report] = {}

    def measure(self) -> None:
        """Run what the rows lack."""
        for name, grid in self.grids.items():
            tasks = {family: self.bench.tasks[family] for family in grid.families}
            title, refusals = f"Five systems, {name}", list[Refusal]()
            self.bench.run(grid, title, tasks=tasks, refusals=refusals)
            gone = [refusal.variant for refusal in refusals]
            left = grid.model_copy(update={"variants": tuple(v for v in grid.variants if v not in gone)})
            for budget in self.budgets:
                self.reports[part(budget, name)] = self.bench.report(at(left, budget), title, tasks)

    def changes(self) -> list[dict[str, Any]]:
        """Every sentence at every budget: the change in answers and in gain, on what both sides were asked."""
        store, found = RowStore(self.bench.rows), []
        for system, said in SAID.items():
            for one in said:
                for budget in (budget for budget in one.budgets if budget in self.budgets):
                    answers = self._answers(one, budget)
                    gain = self._gain(store, one, budget) if one.question == "unseen" else None
                    found.append(
                        {
                            "system": system,
                            "label": one.label,
                            "base": one.base,
                            "way": one.way,
                            "text": one.text,
                            "question": one.question,
                            "budget": budget,
                            "answers": answers and answers.model_dump(),
                            "gain": gain and gain.model_dump(),
                        }
                    )
        return found

    def _answers(self, one: Said, budget: float) -> Interval | None:
        for summary in self.reports[part(budget, one.question)].summaries:
            if summary.variant.label == one.label and summary.variant.budget == budget:
                return summary.ahead.get(one.base)
        return None

    def _gain(self, store: RowStore, one: Said, budget: float) -> Interval | None:
        """Of the texts: the gain of `label` less the gain of `base`."""
        grid, task = self.grids["text"], self.bench.tasks[TEXT]
        known = {(v.label, v.budget): v for v in grid.variants}

        def rows(label: str, budget: float | None) -> list[Row]:
            variant = known.get((label, budget))
            if variant is None:
                return []
            cell = cell_of(grid, self.bench.identity, variant, TEXT, grid.lengths[0], "unseen", task)
            return store.rows(cell.key, range(plan_of(grid, task).contexts))

        sides = (rows(one.label, budget), rows(one.base, budget), rows("full", None), rows(WINDOW, budget))
        return gain_change(*sides)


def part(budget: float, name: str) -> str:
    """The name of one budget's report on `text`, or on questions that are `unseen` or `seen`."""
    return f"{name} {budget:g}"


def merged(before: Mapping[str, Any], systems: Systems) -> dict[str, Any]:
    """The results with what was measured now in the place of what there was of its budgets."""
    order = [(system, one.label, one.base) for system, said in SAID.items() for one in said]
    stays = [one for one in before.get("changes", ()) if one["budget"] not in systems.budgets]
    changes = sorted(
        [*stays, *systems.changes()],
        key=lambda one: (order.index((one["system"], one["label"], one["base"])), one["budget"]),
    )
    ends = tuple(f" at {Variant(method='full', budget=budget).budget_text}" for budget in systems.budgets)
    refused = {name: why for name, why in before.get("refused", {}).items() if not name.endswith(ends)}
    return {
        "reports": {**before.get("reports", {}), **{name: lean(x) for name, x in systems.reports.items()}},
        "changes": changes,
        "refused": refused | systems.bench.refused,
    }


def shown(found: Mapping[str, Any], name: str) -> str:
    """One change in points, and what it says of the sentence."""
    if found[name] is None:
        return "-"
    change = Interval.model_validate(found[name])
    alike = change.low == change.high == 0  # no question tells the two apart, as where neither finds anything
    return f"{points(change)}: {'open' if alike else verdict(change, *WAYS[found['way']])}"


def said_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Sentences of one paper."""
    lines = [
        [
            f"`{one['label']}`",
            f"`{one['base']}`",
            f"{100 * one['budget']:g} %",
            one["text"],
            one["way"],
            f"{shown(one, 'answers')}",
            shown(one, "gain"),
        ]
        for one in found
        if one["answers"] is not None or one["gain"] is not None
    ]
    columns = ["variant", "against", "budget", "the paper", "says", "answers, points", "gain, points"]
    return table(columns, lines) if lines else "Not measured yet, or refused at the budgets above."


def systems_table(reports: Mapping[str, Report], budget: float) -> str:
    """Every mode at one budget, by the mean of answers and gain."""
    lines: list[tuple[float, list[str]]] = []
    texts = {(c.cell.variant.label, c.cell.variant.budget): c for c in reports[part(budget, "text")].cells}
    means = {
        name: {(s.variant.label, s.variant.budget): s for s in reports[part(budget, name)].summaries}
        for name in ("unseen", "seen")
    }
    for label in MODES:
        own = [means[name].get((label, budget)) for name in ("unseen", "seen")]
        text = texts.get((label, budget))
        if text is None or text.recovered is None:
            continue
        every, far = text.recovered.every, text.recovered.far
        excess = text.usage.excess_share or 0.0
        merit = every.value + (far.value if far else 0.0) + sum(s.accuracy.value for s in own if s)
        cells = [percent(s.accuracy) if s else "-" for s in own]
        lines.append((-merit, [f"`{label}`", *cells, gained(every), gained(far), f"{100 * excess:.1f}"]))
    lines.sort(key=lambda line: line[0])
    columns = [
        "method",
        "needles, asked later",
        "needles, asked before",
        "gain, all tokens",
        "gain, far tokens",
        "beside the budget, % of the KV",
    ]
    return table(columns, [cells for _, cells in lines])


def write_page(name: str, title: str) -> Path:
    """The page, from the results."""
    content = read_parts(name)
    reports: dict[str, Report] = content["reports"]
    budgets = [budget for budget in BUDGETS if part(budget, "text") in reports]
    unseen = reports[part(budgets[0], "unseen")]
    length = unseen.summaries[0].length
    full = {
        mode: next(s for s in reports[part(budgets[0], mode)].summaries if s.variant.method == "full")
        for mode in ("unseen", "seen")
    }
    names = sorted({c.cell.family for c in unseen.cells})
    paragraphs = []
    for budget in budgets:
        paragraphs += [f"### {100 * budget:g} %", systems_table(reports, budget)]
    for system in SAID:
        found = [one for one in content["changes"] if one["system"] == system]
        paragraphs += [f"## {system}: what the paper says", said_table(found)]
    listed = "\n".join(f"- {name}: {why}" for name, why in content["refused"].items())
    left = ", ".join(f"{100 * budget:g} %" for budget in BUDGETS if budget not in budgets)
    switched = {(one["label"], one["budget"]) for one in content["changes"] if one["answers"] or one["gain"]}
    parts = {SWITCHED: SWITCHED_LINES.values(), WHOLE: (WHOLE_LINES,)}
    without = [
        f"{100 * budget:g} %"
        for budget, own in parts.items()
        if budget in budgets and not any((label, budget) in switched for lines in own for label in lines)
    ]
    return write_document(
        name,
        f"# The five systems on {title}",
        "Made by `benchmarks/quality/systems.py`; do not edit. SeKV, HeteroCache, SentenceKV, CompressKV and SpeContext as their papers "
        "have them (`paper`) and with everything held within the budget, beside the methods that they compare with.",
        f"Contexts of {length:,} tokens. *Needles*: {' and '.join(f'`{name}`' for name in names)}, asked after compression (later) or "
        f"with the question at the prompt's end (before); the full cache finds {percent(full['unseen'].accuracy)} and "
        f"{percent(full['seen'].accuracy)} %. "
        + GAIN
        + " In brackets 95 % intervals, clustered by context. `paper` of methods that "
        'compress a prompt once is `generated="kept"`: what is generated stays beside the budget, as the last column says. '
        "`omnikv, strict` computes the attention of its few filter layers on the host, over all tokens, which no budget counts.",
        *([f"Not measured yet: {left}."] if left else []),
        *([f"Not measured yet: parts, switched one at a time at {', '.join(without)}."] if without else []),
        "## Answers and gain",
        *paragraphs,
        "*seen*: the interval lies on the side that the paper names (for *equal*: within 5 points); *not seen*: it lies beyond; *open*: "
        "it holds both, or no question tells the two apart. Switches act on one profile, where papers train each variant anew."
        + (
            SAME
            if any(one["gain"] and not one["gain"]["low"] < one["gain"]["high"] for one in content["changes"])
            else ""
        ),
        *(["## Left out", listed] if listed else []),
        "## Provenance",
        provenance_of(reports[part(budgets[-1], "text")], *reports.values()),
    )


def main() -> None:
    """Measure, write the results, write the page."""
    options = parser((__doc__ or "").splitlines()[0], page=True)
    options.add_argument("--texts", type=int, help="texts, instead of the published number")
    options.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="of these alone (%(default)s)")
    options.add_argument("--modes", action="store_true", help="the modes of each method, without switches of its parts")
    options.set_defaults(
        length=LENGTH, tasks="niah_single_1,niah_single_2", answer=ANSWER, going_on=GOING_ON, together=TOGETHER
    )
    asked = options.parse_args()
    budgets = shares(asked.budgets, "--budgets")
    if not set(budgets) <= set(BUDGETS):
        options.error(f"--budgets {asked.budgets}: expected some of {', '.join(map(str, BUDGETS))}")
    bench = Bench(NAME, asked)
    if bench.is_bundled:
        options.error("--model is needed: the bundled model's figures are on the pages of the single papers")
    if not asked.page:
        systems = Systems(bench, asked.samples or SAMPLES, asked.texts or TEXTS, budgets, modes=asked.modes)
        systems.measure()
        before = read_parts(bench.name) if (RESULTS / f"{bench.name}.json").is_file() else {}
        content = merged(before, systems)
        write_parts(bench.name, content.pop("reports"), content)
    print(f"wrote {write_page(bench.name, bench.title)}")


if __name__ == "__main__":
    main()
