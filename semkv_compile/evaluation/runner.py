"""Runs a grid: one prefill per context, every missing variant on it, a row stored after each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from semkv.errors import BudgetError, ConfigError
from semkv.evaluation import environment
from semkv.evaluation.agreement import Told
from semkv.evaluation.answering import Answering, Tally
from semkv.evaluation.attention_mass import MassWatch
from semkv.evaluation.samples import Question
from semkv.evaluation.schema import Row
from semkv.evaluation.settings import Cell, Grid, Plan, QuestionMode, Variant
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import Subject
from semkv.evaluation.tasks.base import Task
from semkv.evaluation.tasks.bundled import family_tasks
from semkv.evaluation.workers import check_workers, in_processes
from semkv.methods import METHODS

FULL = Variant(method="full")
Progress = Callable[[int, int, str], None]
"""Called with (units done, units in all, what runs now); a unit is one variant on one context."""


def all_tasks(tasks: Mapping[str, Task] | None = None) -> dict[str, Task]:
    """The bundled families, and `tasks` beside them."""
    return {**family_tasks(), **(tasks or {})}


@dataclass(frozen=True)
class Work:
    """One context with the variants that have no row for it yet, each with its cell's key."""

    family: str
    length: int
    question: QuestionMode
    index: int
    asked: int
    variants: tuple[tuple[Variant, str], ...]


@dataclass(frozen=True)
class Refusal:
    """A variant whose budget is too small for a context, and why."""

    variant: Variant
    why: str


def plan_of(grid: Grid, task: Task | None) -> Plan:
    """How many questions a cell of `task` asks; None for a bundled family."""
    return grid.plan() if task is None else grid.plan(task.questions_per_context, task.available)


def cell_of(
    grid: Grid,
    identity: str,
    variant: Variant,
    family: str,
    length: int,
    question: QuestionMode,
    task: Task | None = None,
) -> Cell:
    """The cell of one variant, family, length and question mode; `task` is what stands behind the family's name."""
    return Cell(
        variant=variant,
        family=family,
        length=length,
        question=question,
        subject=identity,
        parameters=_parameters(variant),
        seed=grid.seed,
        questions_per_context=plan_of(grid, task).per_context,
        task=None if task is None else task.parameters(),
    )


def _parameters(variant: Variant) -> dict[str, Any]:
    """Every parameter of a variant's method; its options alone where the method is not one of semkv's."""
    known = METHODS.get(variant.method)
    return dataclasses.asdict(known().with_options(variant.options)) if known is not None else dict(variant.options)


def check_grid(grid: Grid, subject: Subject, tokenizer: Any, tasks: Mapping[str, Task] | None = None) -> None:
    """Refuse what cannot run before anything does: tasks, lengths, methods, budgets and options.

    One sample of each task that is not a bundled family is made, so that missing data and a tokenizer that cannot
    express the task are seen.
    """
    known = all_tasks(tasks)
    for family in grid.families:
        if family not in known:
            raise ConfigError(f"family {family!r}: expected one of {', '.join(known)}")
    for family in grid.families:
        task = known[family]
        for length in grid.lengths:
            task.check_length(length, subject.compiled.program.max_positions)
        if "seen" in grid.questions and not task.has_question:
            raise ConfigError(
                f"task {family!r} asks no question after its context: question 'seen' means nothing for it, take 'unseen'"
            )
    for variant in grid.variants:
        check_variant(variant, subject, min(grid.lengths))
    for family in tasks or {}:
        if family in grid.families:
            plan = plan_of(grid, known[family])
            known[family].make(tokenizer, min(grid.lengths), 0, seed=grid.seed, questions=plan.asked(0))


def check_variant(variant: Variant, subject: Subject, length: int) -> None:
    """Refuse a method that the profile lacks something for, wrong options, and a budget that at `length` tokens is below the method's
    smallest; contexts may be a few tokens shorter."""
    placement = subject.variant(variant).placement
    if variant.budget is None:
        return
    tokens = placement.budget.average_tokens(length)
    if tokens < placement.minimum_tokens:
        raise BudgetError(
            f"budget {variant.budget} at length {length} leaves {tokens:.1f} tokens per KV head, method "
            f"{variant.method!r} needs at least {placement.minimum_tokens}: take a larger budget or longer contexts"
        )


def missing_work(grid: Grid, identity: str, store: RowStore, tasks: Mapping[str, Task] | None = None) -> list[Work]:
    """What a run still has to do; families take turns, so that an early stop has seen some of each."""
    known = all_tasks(tasks)
    plans = {family: plan_of(grid, known.get(family)) for family in grid.families}
    keys = {
        (question, length, family): [
            (variant, cell_of(grid, identity, variant, family, length, question, known.get(family)).key)
            for variant in grid.variants
        ]
        for question in grid.questions
        for length in grid.lengths
        for family in grid.families
    }
    work = []
    for question in grid.questions:
        for length in grid.lengths:
            for index in range(max(plan.contexts for plan in plans.values())):
                for family, plan in plans.items():
                    if index >= plan.contexts:
                        continue
                    asked = plan.asked(index)
                    # Variants that differ by their label alone share a cell, and are measured once.
                    compared = grid.agreement and known[family].kind != "exact"
                    left = {
                        key: (v, key)
                        for v, key in keys[question, length, family]
                        if not store.has(key, index, asked, compared=compared and v.method != "full", mass=grid.mass)
                    }
                    if left:
                        work.append(Work(family, length, question, index, asked, tuple(left.values())))
    return work


@torch.no_grad()
def run_grid(
    subject: Subject,
    tokenizer: Any,
    grid: Grid,
    store: RowStore,
    progress: Progress | None = None,
    tasks: Mapping[str, Task] | None = None,
    workers: int = 1,
    refusals: list[Refusal] | None = None,
) -> None:
    """Measure every cell of `grid` that `store` lacks. An interrupt between two rows loses nothing.

    tasks: what the names in `grid.families` stand for, beside the bundled families. workers: processes that measure contexts side
    by side (`semkv.evaluation.workers`); times of steps are then those of a busy machine. refusals: takes the variants whose
    budget is too small for a context, each with the first such context, and which see no more then; without it that is an error.

    Raises ConfigError before any work where the grid cannot run, BudgetError where a context is refused and `refusals` is None.
    """
    check_workers(workers, subject.compiled.device)
    check_grid(grid, subject, tokenizer, tasks)
    known = all_tasks(tasks)
    work = missing_work(grid, subject.identity, store, tasks)
    total = sum(len(item.variants) for item in work)
    commit = environment.commit()
    gone: set[str] = set()  # what this process has seen refused
    first: dict[str, tuple[int, Refusal]] = {}  # of all processes: by variant, the earliest work that it refused

    def results_of(turn: tuple[int, Work]) -> Iterator[Row | Refusal]:
        item = turn[1]
        left = tuple((variant, key) for variant, key in item.variants if variant.model_dump_json() not in gone)
        for result in _run_context(
            Answering(subject, tokenizer, known[item.family]), grid, replace(item, variants=left), commit
        ):
            if isinstance(result, Refusal):
                gone.add(result.variant.model_dump_json())
            yield result

    turns = list(enumerate(work))
    alone = ((turn, result) for turn in turns for result in results_of(turn))
    found = alone if workers == 1 else in_processes(results_of, turns, workers)
    for done, ((place, item), result) in enumerate(found, start=1):
        if isinstance(result, Row):
            store.add(result)
        elif refusals is None:
            raise BudgetError(result.why)
        else:
            name = result.variant.model_dump_json()
            first[name] = min(first.get(name, (place, result)), (place, result), key=itemgetter(0))
        if progress is not None:
            progress(done, total, f"{item.family}, {item.length} tokens, question {item.question}")
    if refusals is not None:
        refusals += [refusal for _, refusal in sorted(first.values(), key=itemgetter(0))]


def _run_context(answering: Answering, grid: Grid, work: Work, commit: str) -> Iterator[Row | Refusal]:
    """Rows of one context, one variant after the other."""
    if not work.variants:
        return
    task = answering.task
    sample = task.make(
        answering.tokenizer,
        work.length,
        work.index,
        seed=grid.seed,
        questions=plan_of(grid, task).per_context,
    )
    questions = sample.questions[: work.asked]
    if work.question == "unseen":
        yield from _unseen(answering, grid, work, commit, sample.ids, questions)
    else:
        yield from _seen(answering, grid, work, commit, sample.ids, questions)


def _unseen(
    answering: Answering, grid: Grid, work: Work, commit: str, ids: tuple[int, ...], questions: Sequence[Question]
) -> Iterator[Row | Refusal]:
    """The context is compressed, then each question comes over a fork of it."""
    subject = answering.subject
    told: list[Told | None] = [None] * len(questions)
    record = subject.record(ids, _with_full(grid, work))
    if grid.agreement:
        whole = subject.variant(FULL).compress(record)
        told = [answering.answer(subject.variant(FULL), whole.fork(), q.ids, q, Tally()) for q in questions]
    for variant, key in work.variants:
        tally = Tally()
        compiled = subject.variant(variant)
        state = _compress(compiled, variant, record, tally, work)
        if isinstance(state, Refusal):
            yield state
            continue
        for question, theirs in zip(questions, told):
            theirs = None if variant.method == FULL.method else theirs
            watch = MassWatch(record.ordered_for(compiled.program)) if grid.mass else None
            answering.answer(compiled, state.fork(), question.ids, question, tally, theirs, watch)
        yield tally.row(key, work.index, commit, len(ids))


def _seen(
    answering: Answering, grid: Grid, work: Work, commit: str, ids: tuple[int, ...], questions: Sequence[Question]
) -> Iterator[Row | Refusal]:
    """Each question is read with the context, before it is compressed."""
    subject, tallies = answering.subject, {key: (variant, Tally()) for variant, key in work.variants}
    for question in questions:
        record, told = subject.record((*ids, *question.ids), _with_full(grid, work)), None
        if grid.agreement:
            told = answering.answer(
                subject.variant(FULL), subject.variant(FULL).compress(record), (), question, Tally()
            )
        for key, (variant, tally) in list(tallies.items()):
            compiled = subject.variant(variant)
            state = _compress(compiled, variant, record, tally, work)
            if isinstance(state, Refusal):
                del tallies[key]
                yield state
                continue
            theirs = None if variant.method == FULL.method else told
            watch = MassWatch(record.ordered_for(compiled.program)) if grid.mass else None
            answering.answer(compiled, state, (), question, tally, theirs, watch)
    for key, (_, tally) in tallies.items():
        yield tally.row(key, work.index, commit, len(ids))


def _with_full(grid: Grid, work: Work) -> list[Variant]:
    """The variants that read a context's record."""
    return [*(variant for variant, _ in work.variants), *([FULL] if grid.agreement else [])]


def _compress(compiled: Any, variant: Variant, record: Any, tally: Tally, work: Work) -> Any:
    started = time.perf_counter()
    try:
        state = compiled.compress(record)
    except BudgetError as error:
        return Refusal(variant, f"{work.family}, {work.length} tokens, context {work.index}: {error}")
    tally.compress_us += 1e6 * (time.perf_counter() - started)
    return state
