"""The long table of a real model: every method at 3, 5 and 10 % of its memory, on needles and on ordinary text.

    python -m benchmarks.quality.real_table smollm2 --profile profiles/smollm2_135m  # both lengths; hours, stated before they start
    python -m benchmarks.quality.real_table gemma3 --profile P --lengths 2K,4K,8K --texts FOLDER  # goes on where it stopped
    python -m benchmarks.quality.real_table gemma3 --texts FOLDER --publish  # the methods that read no profile
    python -m benchmarks.quality.real_table smollm2 --profile P --publish --leaders 1  # adds to benchmarks/results/real_smollm2.json

All methods answer the first questions; at each length and budget the best of them, and those that are named to the end, answer all. What
benchmarks/results has of the same questions, model and profile is not measured again, so that several machines or days add up. Texts are
the files of a folder, a kind each; without one, the half of Python's manual and library that `benchmarks/quality/real.py` does not
calibrate on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.grids import read_results, write_results
from benchmarks.lib.places import RESULTS, ROOT
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.quality.real import write_texts
from semkv.api import compile as compile_model
from semkv.cli.common import progress_bar, quiet_libraries, whole_numbers, words
from semkv.cli.models import load_model
from semkv.config import CompileConfig
from semkv.errors import BudgetError
from semkv.evaluation import Grid, Report, Variant, evaluate
from semkv.evaluation.identity import subject_identity
from semkv.evaluation.runner import Refusal, cell_of, check_variant
from semkv.evaluation.schema import CellResult, Interval
from semkv.evaluation.subject import Subject
from semkv.evaluation.tasks import build_tasks
from semkv.evaluation.tasks.base import Task
from semkv.io.cache_folder import cache_folder
from semkv.methods import METHODS
from semkv.profiles.schema import Profile

BUDGETS = (0.03, 0.05, 0.1)
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")
ANSWER = 64
"""Tokens that a needle's answer may have: it begins with what was found, and the longest, an identifier, has some 40. RULER's 128 would
double the time of those that find nothing."""
ABLE = 0.8
"""Needle tasks on which the full cache finds less are shown, and not in the mean."""
PLAIN = (
    "full",
    "streaming_llm",
    "snapkv",
    "h2o",
    "pyramidkv",
    "chunkkv",
    "cake",
    "quest",
    "shadowkv",
    "infllm",
    "clusterkv",
)
"""Methods that read no profile, so that their rows stay when the profile is made again."""
CODES = ("sketch",)
"""Methods that read the profile's sketch alone: their rows stay when other sections are learned, and those of others when the sketch is."""
WHOLE = ("mixed",)
"""Methods that read both."""
GROUPS = ("plain", "profile", "codes", "whole")
BOTH = ("full", "streaming_llm")
"""What recovered gain is measured between."""
BOOKS = {"schema_version", "fingerprint", "model", "measured", "provenance", "tensors", "tensors_digest"}
"""Of a profile, all but its sections."""
CEILING = Variant(method="sketch", budget=0.05, options={"oracle": True, "exact_form": "int8"}, label="ceiling")
"""The choice of `sketch` made by true attention, its index not charged; in 8 bits, as tokens that are well chosen need not be many."""
EIGHT_BITS = Variant(method="sketch", budget=0.03, options={"exact_form": "int8"}, label="sketch, 8 bits")
"""Where `sketch` takes 4 bits by itself, what it would be in 8."""
STEP, ASKED = 1.0, 60
"""Usual values: a method's step, over the full cache's, in which contexts are together; tokens of a question, which run one by one, and
of its answer."""
TOGETHER = 16
"""Contexts whose answers run in the same steps: as many rows as share the products of one."""
LEADERS = 3
AUTO = "auto"
"""What the profile takes at a budget, under this name as well."""
STRICT = ("heterocache", "omnikv", "specontext")
"""Methods that some budgets are too small for unless nothing is whole."""


@dataclass(frozen=True)
class Size:
    """Questions of each needle task, and texts with so many tokens read behind each."""

    questions: int
    texts: int


FIRST, WHOLE = Size(4, 8), Size(50, 60)
"""Per task: two needle tasks that count are a hundred questions."""


def tasks_of(model: str, texts: Path | None, haystack: Path | None, tokens: int) -> dict[str, Task]:
    """Needles and ordinary text. texts: a folder; None: what `benchmarks/quality/real.py` judges on. haystack: None: the first
    of the texts."""
    folder = texts or write_texts(ROOT / "real_output" / "texts")["judged"][0].parent
    sources = {"text": str(folder), "haystack": str(haystack or sorted(folder.glob("*.txt"))[0])}
    chat = model == "smollm2"  # the other one was not trained to follow instructions
    settings = {"perplexity": {"tokens": tokens}} | {name: {"new_tokens": ANSWER} for name in NEEDLES}
    return build_tasks(("perplexity", *NEEDLES), sources=sources, options=settings, chat=chat)


def group_of(method: str) -> str:
    """What of a profile a method reads: `plain` nothing, `profile` all but its sketch, `codes` that alone, `whole` both."""
    if method in PLAIN:
        return "plain"
    return "codes" if method in CODES else "whole" if method in WHOLE else "profile"


def without_sketch(profile: Profile) -> Profile:
    """The profile as methods read it that have no codes."""
    tensors = {name: x for name, x in profile.tensors.items() if not name.startswith("sketch.")}
    return replace(profile, info=profile.info.model_copy(update={"sketch": None}), tensors=tensors)


def only_sketch(profile: Profile) -> Profile:
    """The profile as methods read it that have codes alone."""
    tensors = {name: x for name, x in profile.tensors.items() if name.startswith("sketch.")}
    others = dict.fromkeys(
        name for name in type(profile.info).model_fields if name not in BOOKS | {"sketch", "choices"}
    )
    return replace(profile, info=profile.info.model_copy(update=others), tensors=tensors)


class Table:
    """The rows of one model: with the profile, and without it."""

    def __init__(self, asked: argparse.Namespace) -> None:
        quiet_libraries()
        torch.set_num_threads(1)
        self.asked = asked
        self.lengths = tuple(whole_numbers(asked.lengths, "--lengths"))
        self.needles = tuple(words(asked.needles, "--needles"))
        self.tasks = tasks_of(asked.model, asked.texts, asked.haystack, asked.tokens)
        path = fetch(MODELS[asked.model], cache_folder() / "models")
        self.loaded = load_model(str(path), asked.profile)
        self.settings = CompileConfig(kv_dtype="float16", floor=0, cache=True)
        self._compiled: dict[str, Any] = {}
        self.commits: set[str] = set()
        self.refused: dict[tuple[str, float, int], str] = {}
        self.cells: dict[tuple[str, str], CellResult] = {}
        """What was measured, by the cell's key and the variant's label, the most contexts of each."""
        self.notes: Sequence[str] = ()
        if (RESULTS / f"real_{asked.model}.json").is_file() and not asked.afresh:
            published = read_results(f"real_{asked.model}")
            self.take(published.cells)
            self.commits.update(published.commits)
            self.notes = published.notes
        self._subjects: dict[str, Subject] = {}
        self._identities: dict[str, str] = {}

    def profile(self, reads: str) -> Profile | None:
        """What the methods of one group read."""
        whole = self.loaded.profile
        if reads == "plain" or whole is None:
            return None
        return {"codes": only_sketch, "profile": without_sketch}.get(reads, lambda profile: profile)(whole)

    def compiled(self, reads: str) -> Any:
        """The model with the profile of one group."""
        if reads not in self._compiled:
            self._compiled[reads] = compile_model(
                self.loaded.model, self.profile(reads), method="full", config=self.settings
            )
        return self._compiled[reads]

    def take(self, cells: Iterable[CellResult]) -> None:
        """Keep cells that were measured."""
        for cell in cells:
            key = cell.cell.key, cell.cell.variant.label
            known = self.cells.get(key)
            if known is None or known.accuracy.contexts <= cell.accuracy.contexts:
                self.cells[key] = cell.model_copy(update={"zoom": None, "mass": None, "depths": []})

    def run(self, variants: Sequence[Variant], size: Size, length: int, title: str) -> list[CellResult]:
        """Cells of these variants at one length, those of methods that read no profile from rows of their own."""
        found: dict[tuple[str, str], CellResult] = {}
        for reads in GROUPS:
            own = [v for v in variants if group_of(v.method) == reads]
            for families, samples in ((self.needles, size.questions), (("perplexity",), size.texts)):
                known = [self._known(v, family, length, samples, reads) for v in own for family in families]
                left = [v for v in own if any(self._known(v, f, length, samples, reads) is None for f in families)]
                left = [v for v in left if self._serves(v, reads, length)]
                if left:
                    budgets = sorted({v.budget for v in left if v.budget and families == ("perplexity",)})
                    between = [Variant(method="full"), *(Variant(method="streaming_llm", budget=b) for b in budgets)]
                    every = {(v.method, v.budget, v.label): v for v in (*between, *left)}
                    report = self._measure(list(every.values()), families, samples, length, reads, title)
                    self.take(report.cells)
                    if self.asked.publish:
                        self.publish()
                    found |= {(c.cell.key, c.cell.variant.label): c for c in report.cells}
                found |= {(c.cell.key, c.cell.variant.label): c for c in known if c is not None}
        return list(found.values())

    def _known(self, variant: Variant, family: str, length: int, samples: int, reads: str) -> CellResult | None:
        """What was measured of a variant, if it was on so many contexts."""
        grid = Grid(variants=(variant,), families=(family,), lengths=(length,), samples=samples)
        identity = self._identity(reads)
        cell = cell_of(grid, identity, variant, family, length, "unseen", self.tasks[family])
        found = [self.cells.get((cell.key, variant.label))]
        if variant.method in BOTH:  # published of one group alone
            same = (variant.method, variant.budget, family, length)
            found += [
                c
                for c in self.cells.values()
                if (c.cell.variant.method, c.cell.variant.budget, c.cell.family, c.cell.length) == same
            ]
        return next((c for c in found if c is not None and c.accuracy.contexts >= samples), None)

    def _identity(self, reads: str) -> str:
        if reads not in self._identities:
            subject = self.loaded.model, self.profile(reads), self.settings, self.compiled(reads).dtype
            self._identities[reads] = subject_identity(*subject)
        return self._identities[reads]

    def publish(self) -> None:
        """Write benchmarks/results/real_MODEL.json."""
        best: dict[tuple[Any, ...], CellResult] = {}
        now = {self._identity(reads) for reads in GROUPS}
        for cell in self.cells.values():  # what gain is measured between was measured with the profile and without
            of, variant = cell.cell, cell.cell.variant
            if self.asked.profile is not None and of.subject not in now:  # of a profile before
                continue
            own = (variant.method, variant.budget) if variant.method in BOTH else (of.key, variant.label)
            key = (*own, of.family, of.length)
            if key not in best or best[key].accuracy.contexts < cell.accuracy.contexts:
                best[key] = cell
        cells = list(best.values())
        texts = (
            "" if self.asked.texts is None else ", ".join(path.stem for path in sorted(self.asked.texts.glob("*.txt")))
        )
        notes = [
            f"texts: {texts or 'the half of the manual and library of Python that benchmarks/quality/real.py judges on'}"
        ]
        if self.asked.profile is None:  # what was published of methods that read one stays
            notes += [note for note in self.notes if note.startswith("profile: ")]
        elif self.loaded.profile is not None:
            held = self.loaded.profile.info.model_dump(exclude=BOOKS, exclude_none=True)
            notes.append(f"profile: {', '.join(name.replace('_', ' ') for name, section in held.items() if section)}")
        changes = {"cells": cells, "summaries": [], "commits": sorted(self.commits), "notes": notes}
        report = self.report.model_copy(update=changes)
        write_results(f"real_{self.asked.model}", report)

    def _measure(
        self, variants: list[Variant], families: tuple[str, ...], samples: int, length: int, reads: str, title: str
    ) -> Report:
        compiled, refusals = self.compiled(reads), list[Refusal]()
        grid = Grid(variants=tuple(variants), families=families, lengths=(length,), samples=samples)
        with progress_bar(f"{title}, {families[0]}") as progress:
            report = evaluate(
                compiled,
                self.loaded.tokenizer,
                grid,
                identity=self._identity(reads),
                model=self.loaded.name,
                title="The long table of a real model",
                rows=self.asked.rows / f"real_{self.asked.model}_{reads}.rows.jsonl",
                progress=progress,
                tasks=self.tasks,
                workers=self.asked.workers,
                together=self.asked.together,
                refusals=refusals,
            )
        if not report.complete:
            raise SystemExit("stopped before it was complete; the same command goes on")
        for refusal in refusals:
            assert isinstance(refusal.variant.budget, float)
            self.refused[refusal.variant.label, refusal.variant.budget, length] = refusal.why
        self.report = report
        self.commits.update(report.commits)
        return report

    def _serves(self, variant: Variant, reads: str, length: int) -> bool:
        """Whether a method can live in a budget at this length."""
        key = (variant.label, variant.budget or 0.0, length)
        subject = self._subjects.setdefault(reads, Subject(self.compiled(reads), ""))
        if key not in self.refused:
            try:
                check_variant(variant, subject, length)
            except BudgetError as error:
                self.refused[key] = str(error)
        return key not in self.refused


def able(cells: Iterable[CellResult]) -> tuple[str, ...]:
    """Needle tasks that the full cache answers."""
    full = {c.cell.family: c.accuracy.value for c in cells if c.cell.variant.method == "full"}
    return tuple(name for name in NEEDLES if full.get(name, 0.0) >= ABLE)


def standing(needles: Sequence[float], gains: Sequence[Interval | None]) -> float:
    """Mean of needles found and of the gain of all and of far tokens, each at most 1; below everything where nothing was measured."""
    parts = [sum(needles) / len(needles)] if needles else []
    parts += [max(0.0, min(1.0, gain.value)) for gain in gains if gain is not None]
    return sum(parts) / len(parts) if parts else float("-inf")


def standing_of(cells: Sequence[CellResult], variant: Variant, names: tuple[str, ...]) -> float:
    """`standing` of one variant's cells, with the needle tasks `names`."""
    own = {c.cell.family: c for c in cells if c.cell.variant == variant}
    kept = own["perplexity"].recovered if "perplexity" in own else None
    if kept is None:
        return float("-inf")
    return standing([own[name].accuracy.value for name in names if name in own], [kept.every, kept.far])


def made(method: str, budget: float, label: str) -> Variant:
    """A method as it runs here, under the name `label`."""
    options = {"strict": True} if method in STRICT else {}
    return Variant(method=method, budget=budget, label=label, options=options)


def leaders(cells: Sequence[CellResult], named: Sequence[str], count: int) -> list[Variant]:
    """Variants that answer everything: at each budget the best, and those `named`."""
    names, chosen = able(cells), []
    variants = list({(c.cell.variant.label, c.cell.variant.budget): c.cell.variant for c in cells}.values())
    for budget in BUDGETS:
        own = [v for v in variants if v.budget == budget]
        ranked = sorted(own, key=lambda v: -standing_of(cells, v, names))
        best = [v for v in ranked if v.label not in named][:count]
        chosen += [v for v in ranked if v in best or v.label in named]
    return chosen


def hours(table: Table, variants: int, first: Size, whole: Size, named: int) -> float:
    """About how long both rounds take: from one prompt and a few steps of the full cache at each length."""
    seconds = 0.0
    compiled = table.compiled("plain")
    more = Size(whole.questions - first.questions, whole.texts - first.texts)
    for length in table.lengths:
        sample = table.tasks["perplexity"].make(table.loaded.tokenizer, length, 0, seed=0, questions=1)
        began = time.perf_counter()
        state = compiled.prefill(torch.tensor([list(sample.ids)], dtype=torch.int64, device="cpu"))
        read = time.perf_counter() - began
        for place, token in enumerate(sample.questions[0].answer[:9]):
            began = time.perf_counter() if place == 1 else began  # the first step makes what the others run
            compiled.extend(state, torch.tensor([[token]], dtype=torch.int64, device="cpu"))
        step = STEP * (time.perf_counter() - began) / 8
        for size, count in ((first, variants), (more, len(BUDGETS) * (table.asked.leaders + named))):
            questions = len(table.needles) * size.questions
            seconds += 2 * read * (questions + size.texts)
            seconds += count * step * (questions * ASKED + size.texts * table.asked.tokens)
    return seconds / 3600 / table.asked.workers


def main() -> None:
    """Both rounds, then the results."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", choices=MODELS)
    options.add_argument("--profile", type=Path, help="a profile of the model; without one: the methods that read none")
    options.add_argument("--texts", type=Path, help="folder of texts, a kind in each file")
    options.add_argument("--haystack", type=Path, help="text that needles are hidden in (the first of the folder)")
    options.add_argument("--methods", help="these alone, separated by commas; default: all")
    options.add_argument("--always", default="auto,ceiling", help="to the end in any case (%(default)s)")
    options.add_argument("--leaders", type=int, default=LEADERS, help="the best, as many as answer all (%(default)s)")
    options.add_argument("--afresh", action="store_true", help="measure what benchmarks/results has, too")
    options.add_argument("--lengths", default="2K,4K", help="tokens of context (%(default)s)")
    options.add_argument("--needles", default=",".join(NEEDLES), help="needle tasks, these alone (%(default)s)")
    options.add_argument("--tokens", type=int, default=64, help="that are read behind each text (%(default)s)")
    options.add_argument(
        "--first", default=f"{FIRST.questions},{FIRST.texts}", help="questions and texts of the first round"
    )
    options.add_argument("--whole", default=f"{WHOLE.questions},{WHOLE.texts}", help="and of the second")
    options.add_argument("--rows", type=Path, default=ROOT / "runs", help="folder of rows (%(default)s)")
    options.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    options.add_argument(
        "--together", type=int, default=TOGETHER, help="contexts answered in the same steps (%(default)s)"
    )
    options.add_argument("--publish", action="store_true", help="write benchmarks/results/real_MODEL.json")
    asked = options.parse_args()
    if asked.profile is None and asked.methods:
        reading = sorted(set(words(asked.methods, "--methods")) - set(PLAIN))
        if reading:
            options.error(f"--methods {', '.join(reading)}: expected --profile, or some of {', '.join(PLAIN)}")
    table = Table(asked)
    usual = PLAIN if asked.profile is None else (AUTO, *METHODS)
    methods = (
        words(asked.methods, "--methods")
        if asked.methods
        else [n for n in usual if n == AUTO or (METHODS[n].compresses and not METHODS[n].needs_indexer)]
    )
    variants = [
        made(table.loaded.profile.best_method(budget) if name == AUTO else name, budget, name)
        for name in methods
        for budget in BUDGETS
    ]
    if "sketch" in methods:
        variants += [*(CEILING.model_copy(update={"budget": budget}) for budget in BUDGETS), EIGHT_BITS]
    first, whole = (Size(*whole_numbers(text, "sizes")) for text in (asked.first, asked.whole))
    named = words(asked.always, "--always")
    print(f"about {hours(table, len(variants), first, whole, len(named)):.1f} hours", flush=True)
    for length in table.lengths:
        tried = table.run(variants, first, length, f"all methods, {length:,} tokens")
        print(
            f"{length:,} tokens, needle tasks that the full cache answers: {', '.join(able(tried)) or 'none'}",
            flush=True,
        )
        chosen = leaders(tried, named, asked.leaders)
        print("to the end:", ", ".join(f"{v.label} {v.budget_text}" for v in chosen), flush=True)
        done = table.run(chosen, whole, length, f"the best, {length:,} tokens")
        known = {(c.cell.variant.label, c.cell.variant.budget, c.cell.family) for c in done}
        show(
            done + [c for c in tried if (c.cell.variant.label, c.cell.variant.budget, c.cell.family) not in known],
            length,
        )


def show(cells: Sequence[CellResult], length: int) -> None:
    """One line for each method and budget, the best first."""
    own = [c for c in cells if c.cell.length == length]
    names = able(own)
    variants = list({c.cell.variant.model_dump_json(): c.cell.variant for c in own}.values())
    for variant in sorted(variants, key=lambda v: (v.budget or 0.0, -standing_of(own, v, names))):
        at = {c.cell.family: c for c in own if c.cell.variant == variant}
        found = " ".join(f"{100 * at[name].accuracy.value:4.0f}" for name in NEEDLES if name in at)
        kept = at["perplexity"].recovered if "perplexity" in at else None
        gain = "" if kept is None or kept.far is None else f"{100 * kept.every.value:5.0f} {100 * kept.far.value:5.0f}"
        count = at["perplexity"].accuracy.contexts if "perplexity" in at else 0
        print(f"{variant.label:>16} {variant.budget_text:>5}  {found}  {gain}  ({count} texts)", flush=True)


if __name__ == "__main__":
    main()
