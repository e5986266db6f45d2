"""Which method is best for a model at each budget, by measurement: successive elimination over one prefill per context.

A method's score is the mean over families: of answers, and where a family is a likelihood, of the recovered gain (`semkv.evaluation.gain`)
of all and of far tokens, each from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from semkv.errors import BudgetError, ConfigError
from semkv.evaluation.gain import WINDOW, recovered
from semkv.evaluation.runner import Progress, Refusal, cell_of, check_variant, plan_of, run_grid
from semkv.evaluation.schema import Row
from semkv.evaluation.settings import Grid, Variant
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import Subject
from semkv.evaluation.tasks.base import Task
from semkv.io.ranks import ALONE, Ranks
from semkv.profiles.schema import Choice

FINALISTS = 3
"""Methods per budget that are measured to the end."""


@dataclass(frozen=True)
class Contest:
    """What is compared and on what.

    methods: names, `full` not among them. budgets: fractions of the full KV. families: names of tasks. length: tokens of
    a context. first, samples: questions per family that every method answers, and that the finalists answer. text: families whose figure
    is a likelihood.
    """

    methods: tuple[str, ...]
    budgets: tuple[float, ...] = (0.03, 0.05, 0.1, 0.2)
    families: tuple[str, ...] = ("single", "multi", "confusable", "dense")
    length: int = 2048
    first: int = 4
    samples: int = 16
    questions_per_context: int = 4
    seed: int = 1
    text: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.methods:
            raise ConfigError("no method was given to choose from")
        if not 1 <= self.first <= self.samples:
            raise ConfigError(f"first questions {self.first}: expected 1 to samples ({self.samples})")

    def grid(self, entrants: Mapping[float, tuple[str, ...]], samples: int) -> Grid:
        """The cells of one round."""
        variants = tuple(Variant(method=name, budget=budget) for budget, names in entrants.items() for name in names)
        if self.text:
            measured_between = (Variant(method="full"), *(Variant(method=WINDOW, budget=b) for b in entrants))
            variants += tuple(variant for variant in measured_between if variant not in variants)
        return Grid(
            variants=variants,
            families=(*self.families, *self.text),
            lengths=(self.length,),
            samples=samples,
            questions_per_context=self.questions_per_context,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Outcome:
    """choices: a cell for each method and budget that could run. left_out: why the others could not, in words."""

    choices: tuple[Choice, ...]
    left_out: tuple[str, ...]


def choose(
    compiled: Any,
    tokenizer: Any,
    contest: Contest,
    *,
    identity: str,
    rows: Path | None = None,
    progress: Progress | None = None,
    tasks: Mapping[str, Task] | None = None,
    workers: int = 1,
    together: int = 1,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Measure every method at every budget on a few questions, and the best third on twice as many, until `samples`.

    compiled: a `CompiledModel` that holds what the methods need (profile, weights); its own method does not matter.
    identity, rows, workers, together: as in `evaluate`; a run that stopped goes on. A method that a budget is too small for in one of the
    contexts, or that lacks something in the profile, is left out there. Ties are broken by the bytes that a step moves.
    ranks: share the contexts; all return the same, and the first keeps `rows`.
    """
    subject, store = Subject(compiled, identity), ranks.from_first(lambda: RowStore(rows))
    if not ranks.first:
        store.path = None  # the first process writes
    entrants, left_out = _able(subject, contest)
    measured: dict[tuple[str, float], Choice] = {}
    asked = contest.first
    while entrants:
        grid, refusals = contest.grid(entrants, asked), list[Refusal]()
        run_grid(subject, tokenizer, grid, store, progress, tasks, workers, refusals, together, ranks)
        gone = [refusal for refusal in refusals if refusal.variant.method in entrants.get(refusal.variant.budget, ())]
        left_out += [_left_out(refusal.variant, refusal.why) for refusal in gone]
        for name, budget in [(refusal.variant.method, refusal.variant.budget) for refusal in gone]:
            entrants[budget] = tuple(other for other in entrants[budget] if other != name)
            measured.pop((name, budget), None)
        entrants = {budget: names for budget, names in entrants.items() if names}
        for budget, names in entrants.items():
            for name in names:
                measured[name, budget] = _measured(grid, identity, store, name, budget, contest, tasks)
        if asked >= contest.samples:
            break
        entrants = {budget: _better([measured[name, budget] for name in names]) for budget, names in entrants.items()}
        asked = min(contest.samples, 2 * asked)
    return Outcome(tuple(measured.values()), tuple(left_out))


def _able(subject: Subject, contest: Contest) -> tuple[dict[float, tuple[str, ...]], list[str]]:
    """The methods that the profile and each budget are enough for, and why others cannot run. Those that a context turns out to be too
    small for are refused when they meet it."""
    able: dict[float, tuple[str, ...]] = {}
    left_out = []
    for budget in contest.budgets:
        for name in contest.methods:
            variant = Variant(method=name, budget=budget)
            try:
                check_variant(variant, subject, contest.length)
            except (BudgetError, ConfigError) as error:
                left_out.append(_left_out(variant, str(error)))
            else:
                able[budget] = (*able.get(budget, ()), name)
    return able, left_out


def _left_out(variant: Variant, why: str) -> str:
    return f"{variant.method} at {variant.budget_text}: {why}"


def _measured(
    grid: Grid,
    identity: str,
    store: RowStore,
    name: str,
    budget: float,
    contest: Contest,
    tasks: Mapping[str, Task] | None,
) -> Choice:
    """What the rows of one method and budget say: the mean over families, and what its steps moved."""

    def rows_of(method: str, family: str) -> list[Row]:
        variant = Variant(method=method, budget=None if method == "full" else budget)
        task = (tasks or {}).get(family)
        cell = cell_of(grid, identity, variant, family, contest.length, "unseen", task)
        return store.rows(cell.key, range(plan_of(grid, task).contexts))

    scores, rows = [], []
    for family in (*contest.families, *contest.text):
        found = rows_of(name, family)
        rows += found
        if family in contest.families:
            scores.append(fmean(answer.value for row in found for answer in row.answers))
        elif (gain := recovered(found, rows_of("full", family), rows_of(WINDOW, family))) is not None:
            parts = (gain.every, *([gain.far] if gain.far is not None else []))
            scores.append(fmean(min(max(part.value, 0.0), 1.0) for part in parts))
    steps = sum(row.usage.steps for row in rows)
    moved = sum(row.usage.moved for row in rows) / max(1, steps) / max(1, max(row.usage.full for row in rows))
    return Choice(
        method=name,
        budget=budget,
        length=contest.length,
        score=round(fmean(scores), 6),
        samples=grid.samples,
        moved=round(moved, 6),
    )


def _better(found: list[Choice]) -> tuple[str, ...]:
    """The best third of one budget's methods, `FINALISTS` at least, in their order."""
    ranked = sorted(found, key=lambda choice: (-choice.score, choice.moved))
    kept = {choice.method for choice in ranked[: max(FINALISTS, -(-len(ranked) // 3))]}
    return tuple(choice.method for choice in found if choice.method in kept)


__all__ = ["Contest", "Outcome", "choose"]
