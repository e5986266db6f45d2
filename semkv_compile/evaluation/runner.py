"""Runs a grid: one prefill per context, every missing variant on it, a row stored after each."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from semkv.errors import BudgetError, ConfigError
from semkv.evaluation import environment
from semkv.evaluation.samples import Question, check_lengths, families, make_sample
from semkv.evaluation.schema import Answer, Row, Usage, Zoom
from semkv.evaluation.settings import Cell, Grid, QuestionMode, Variant
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import Subject, add_zooms, usage_of, worst, zoom_of
from semkv.methods import METHODS
from semkv.runtime.row_memory import Placement

Progress = Callable[[int, int, str], None]
"""Called with (units done, units in all, what runs now); a unit is one variant on one context."""


@dataclass(frozen=True)
class Work:
    """One context with the variants that have no row for it yet, each with its cell's key."""

    family: str
    length: int
    question: QuestionMode
    index: int
    asked: int
    variants: tuple[tuple[Variant, str], ...]


@dataclass
class _Tally:
    """What a variant did on the questions of one context, as it adds up to a row."""

    answers: list[Answer] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    compress_us: float = 0.0
    usage: Usage | None = None
    zoom: Zoom | None = None

    def row(self, cell: str, index: int, commit: str, prompt_tokens: int) -> Row:
        """The finished row."""
        assert self.usage is not None
        return Row(
            cell=cell,
            context=index,
            commit=commit,
            answers=self.answers,
            usage=self.usage,
            step_us=self.step_us,
            compress_us=self.compress_us,
            zoom=self.zoom,
            prompt_tokens=prompt_tokens,
        )


def cell_of(grid: Grid, identity: str, variant: Variant, family: str, length: int, question: QuestionMode) -> Cell:
    """The cell of one variant, family, length and question mode."""
    return Cell(
        variant=variant,
        family=family,
        length=length,
        question=question,
        subject=identity,
        parameters=_parameters(variant),
        seed=grid.seed,
        questions_per_context=grid.questions_per_context,
    )


def _parameters(variant: Variant) -> dict[str, Any]:
    """Every parameter of a variant's method; its options alone where the method is not one of semkv's."""
    known = METHODS.get(variant.method)
    return dataclasses.asdict(known().with_options(variant.options)) if known is not None else dict(variant.options)


def check_grid(grid: Grid, subject: Subject) -> None:
    """Refuse what cannot run before anything does: families, lengths, methods, budgets and options."""
    known = families()
    for family in grid.families:
        if family not in known:
            raise ConfigError(f"family {family!r}: expected one of {', '.join(known)}")
    check_lengths(grid.lengths, subject.compiled.program.max_positions)
    for variant in grid.variants:
        _check_smallest(variant, subject.variant(variant).placement, min(grid.lengths))


def _check_smallest(variant: Variant, placement: Placement, length: int) -> None:
    """Refuse a budget that at `length` tokens is below the method's smallest; contexts may be a few tokens shorter."""
    if variant.budget is None:
        return
    stores = placement.budgeted
    tokens = min((placement.budget.cap_tokens(len(stores), store, length) for store in stores), default=math.inf)
    if tokens < placement.minimum_tokens:
        raise BudgetError(
            f"budget {variant.budget} at length {length} leaves {tokens:.1f} tokens per KV head, method "
            f"{variant.method!r} needs at least {placement.minimum_tokens}: take a larger budget or longer contexts"
        )


def missing_work(grid: Grid, identity: str, store: RowStore) -> list[Work]:
    """What a run still has to do; families take turns, so that an early stop has seen some of each."""
    keys = {
        (question, length, family): [
            (variant, cell_of(grid, identity, variant, family, length, question).key) for variant in grid.variants
        ]
        for question in grid.questions
        for length in grid.lengths
        for family in grid.families
    }
    work = []
    for question in grid.questions:
        for length in grid.lengths:
            for index in range(grid.contexts):
                asked = grid.asked(index)
                for family in grid.families:
                    left = [(v, key) for v, key in keys[question, length, family] if not store.has(key, index, asked)]
                    if left:
                        work.append(Work(family, length, question, index, asked, tuple(left)))
    return work


@torch.no_grad()
def run_grid(subject: Subject, tokenizer: Any, grid: Grid, store: RowStore, progress: Progress | None = None) -> None:
    """Measure every cell of `grid` that `store` lacks. An interrupt between two rows loses nothing."""
    check_grid(grid, subject)
    work = missing_work(grid, subject.identity, store)
    total = sum(len(item.variants) for item in work)
    done = 0
    commit = environment.commit()
    for item in work:
        place = f"{item.family}, {item.length} tokens, question {item.question}"
        for row in _run_context(subject, tokenizer, grid, item, commit):
            store.add(row)
            done += 1
            if progress is not None:
                progress(done, total, place)


def _run_context(subject: Subject, tokenizer: Any, grid: Grid, work: Work, commit: str):
    """Rows of one context, one variant after the other."""
    sample = make_sample(
        tokenizer, work.family, work.length, work.index, seed=grid.seed, questions=grid.questions_per_context
    )
    questions = sample.questions[: work.asked]
    if work.question == "unseen":
        record = subject.record(sample.ids, [variant for variant, _ in work.variants])
        for variant, key in work.variants:
            tally = _Tally()
            compiled = subject.variant(variant)
            state = _compress(compiled, record, tally)
            for question in questions:
                _answer(subject, compiled, state.fork(), question.ids, question, tally)
            yield tally.row(key, work.index, commit, len(sample.ids))
        return
    tallies = [_Tally() for _ in work.variants]
    for question in questions:
        record = subject.record((*sample.ids, *question.ids), [variant for variant, _ in work.variants])
        for (variant, _), tally in zip(work.variants, tallies):
            compiled = subject.variant(variant)
            _answer(subject, compiled, _compress(compiled, record, tally), (), question, tally)
    for (_, key), tally in zip(work.variants, tallies):
        yield tally.row(key, work.index, commit, len(sample.ids))


def _compress(compiled: Any, record: Any, tally: _Tally) -> Any:
    started = time.perf_counter()
    state = compiled.compress(record)
    tally.compress_us += 1e6 * (time.perf_counter() - started)
    return state


def _answer(
    subject: Subject, compiled: Any, state: Any, ids: tuple[int, ...], question: Question, tally: _Tally
) -> None:
    """Greedy continuation of `ids` against the answer, token by token until one differs; the state is used up.

    Without `ids` the state's own logits give the first token, as the prefill read the question.
    """
    logits = subject.extend(compiled, state, ids)[0] if ids else state.logits[-1]
    matched = 0
    for place, expected in enumerate(question.answer):
        token = int(logits.argmax())
        matched += token == expected
        last = place + 1 == len(question.answer)
        if last or (token != expected and place > 0):
            break
        # One step is taken even after a wrong first token, so that step times do not depend on being right.
        logits, elapsed = subject.extend(compiled, state, (token,))
        tally.step_us.append(elapsed)
        if token != expected:
            break
    tally.answers.append(
        Answer(
            depth=question.depth,
            correct=matched == len(question.answer),
            matched=matched,
            expected=len(question.answer),
        )
    )
    tally.usage = worst(tally.usage, usage_of(state))
    tally.zoom = add_zooms(tally.zoom, zoom_of(state))
