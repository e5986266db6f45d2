"""Runs a grid: one prefill per context, every missing variant on it, rows stored as they are made."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
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
from semkv.evaluation.talking import talk_together
from semkv.evaluation.tasks.base import Task
from semkv.evaluation.tasks.bundled import family_tasks
from semkv.evaluation.workers import check_workers, in_processes
from semkv.io.ranks import ALONE, Ranks
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
class Reading:
    """A text that is read, of one context, and what is asked behind it: questions, each with the tokens of it that are still to be read.

    place: which of the contexts that run together; context: tokens of it alone; last: whether nothing more is asked of it.
    """

    place: int
    answering: Answering
    work: Work
    context: int
    ids: tuple[int, ...]
    asked: tuple[tuple[Question, tuple[int, ...]], ...]
    last: bool


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
    together: int = 1,
    ranks: Ranks = ALONE,
) -> None:
    """Measure every cell of `grid` that `store` lacks. An interrupt between two rows loses nothing.

    tasks: what the names in `grid.families` stand for, beside the bundled families. workers: processes that measure contexts side
    by side (`semkv.evaluation.workers`); times of steps are then those of a busy machine. refusals: takes the variants whose
    budget is too small for a context, each with the first such context, and which see no more then; without it that is an error.
    together: contexts whose answers run in the same decode steps, all of them read before the first is asked; a row's times of steps
    are its share then. ranks: processes, of this machine or others, that share the contexts; each has all rows in the end.

    Raises ConfigError before any work where the grid cannot run, BudgetError where a context is refused and `refusals` is None.
    """
    check_workers(workers, subject.compiled.device)
    if workers > 1 and ranks.count > 1:
        raise ConfigError(f"workers {workers}: {ranks.count} processes measure contexts side by side already; use 1")
    if together < 1:
        raise ConfigError(f"together {together}: expected at least 1 context")
    check_grid(grid, subject, tokenizer, tasks)
    known = all_tasks(tasks)
    work = missing_work(grid, subject.identity, store, tasks)
    total = sum(len(item.variants) for item in work)
    commit = environment.commit()
    gone: set[str] = set()  # what this process has seen refused
    first: dict[str, tuple[int, Refusal]] = {}  # of all processes: by variant, the earliest work that it refused

    def results_of(turn: tuple[int, tuple[Work, ...]]) -> Iterator[Row | Refusal]:
        left = [
            replace(item, variants=tuple(x for x in item.variants if x[0].model_dump_json() not in gone))
            for item in turn[1]
        ]
        for result in _run_contexts(tokenizer, known, subject, grid, left, commit, together):
            if isinstance(result, Refusal):
                gone.add(result.variant.model_dump_json())
            yield result

    turns = list(enumerate(_side_by_side(work, together, max(workers, ranks.count))))
    found = ranks.deal(turns, results_of) if workers == 1 else in_processes(results_of, turns, workers)
    for done, ((place, (item, *_)), result) in enumerate(found, start=1):
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


def _side_by_side(work: Sequence[Work], together: int, processes: int) -> list[tuple[Work, ...]]:
    """Up to `together` contexts each, of one length and question mode, in the order in which the first of them come; fewer where there
    would not be a group for each process."""
    kinds = Counter((item.length, item.question) for item in work)
    groups: list[list[Work]] = []
    filling: dict[tuple[int, str], list[Work]] = {}
    for item in work:
        kind = item.length, item.question
        if kind not in filling or len(filling[kind]) == min(together, -(-kinds[kind] // processes)):
            filling[kind] = []
            groups.append(filling[kind])
        filling[kind].append(item)
    return [tuple(group) for group in groups]


def _run_contexts(
    tokenizer: Any,
    tasks: Mapping[str, Task],
    subject: Subject,
    grid: Grid,
    works: Sequence[Work],
    commit: str,
    together: int,
) -> Iterator[Row | Refusal]:
    """Rows of contexts, one variant after the other; the answers of one variant run in the same steps."""
    tallies: dict[tuple[int, str], Tally] = {}
    refused: dict[str, int] = {}  # by variant, the place of the first context that refuses it
    for readings in _rounds(tokenizer, tasks, grid, works):
        records = [subject.record(one.ids, _with_full(grid, one.work)) for one in readings]
        told = [
            _told(subject, one, record, together) if grid.agreement else None for one, record in zip(readings, records)
        ]
        variants = {variant.model_dump_json(): variant for one in readings for variant, _ in one.work.variants}
        for name, variant in variants.items():
            compiled, talks = subject.variant(variant), []
            asked: list[tuple[Reading, str, list[Tally]]] = []
            for one, record, theirs in zip(readings, records, told):
                key = next((key for own, key in one.work.variants if own.model_dump_json() == name), None)
                if key is None or one.place >= refused.get(name, len(works)):
                    continue
                tally = tallies.setdefault((one.place, name), Tally())
                state = _compress(compiled, variant, record, tally, one.work)
                if isinstance(state, Refusal):
                    refused[name] = one.place
                    yield state
                    break
                each = [Tally() for _ in one.asked]  # questions end in any order
                asked.append((one, key, each))
                compared = theirs if theirs is not None and variant.method != FULL.method else [None] * len(one.asked)
                for (question, ids), whole, own in zip(one.asked, compared, each, strict=True):
                    watch = MassWatch(record.ordered_for(compiled.program)) if grid.mass else None
                    talks.append(one.answering.answer(compiled, state.fork(), ids, question, own, whole, watch))
            talk_together(subject, compiled, talks, together)
            for one, key, each in asked:
                tally = tallies[one.place, name]
                for own in each:
                    tally.add(own)
                if one.last:
                    yield tally.row(key, one.work.index, commit, one.context)


def _rounds(tokenizer: Any, tasks: Mapping[str, Task], grid: Grid, works: Sequence[Work]) -> Iterator[list[Reading]]:
    """What is read of each context at a time. An unseen question comes over a fork of the context, which is read once; a question that
    is seen is read with it, before it is compressed."""
    readings: list[list[Reading]] = []
    for place, work in enumerate(works):
        if not work.variants:
            continue
        task = tasks[work.family]
        answering = Answering(tokenizer, task)
        planned = plan_of(grid, task).per_context
        sample = task.make(tokenizer, work.length, work.index, seed=grid.seed, questions=planned)
        questions = sample.questions[: work.asked]
        if work.question == "unseen":
            readings.append(
                [
                    Reading(
                        place, answering, work, len(sample.ids), sample.ids, tuple((q, q.ids) for q in questions), True
                    )
                ]
            )
        else:
            last = len(questions) - 1
            readings.append(
                [
                    Reading(place, answering, work, len(sample.ids), (*sample.ids, *q.ids), ((q, ()),), i == last)
                    for i, q in enumerate(questions)
                ]
            )
    for number in range(max(map(len, readings), default=0)):
        yield [own[number] for own in readings if number < len(own)]


def _told(subject: Subject, reading: Reading, record: Any, together: int) -> list[Told | None]:
    """What the full cache says to the questions of a reading."""
    full = subject.variant(FULL)
    whole = full.compress(record)
    talks = [reading.answering.answer(full, whole.fork(), ids, question, Tally()) for question, ids in reading.asked]
    return talk_together(subject, full, talks, together)


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
