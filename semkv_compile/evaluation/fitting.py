"""Which variants can run at a length: found by trying each on one context, before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping

from semkv.errors import BudgetError, ConfigError
from semkv.evaluation.runner import FULL, all_tasks, check_grid, check_variant
from semkv.evaluation.settings import Grid, Variant
from semkv.evaluation.subject import Subject
from semkv.evaluation.tasks.base import Task


def which_fit(
    subject: Subject, tokenizer: object, grid: Grid, tasks: Mapping[str, Task] | None = None
) -> tuple[tuple[Variant, ...], tuple[tuple[Variant, str], ...]]:
    """The variants of `grid` that run at its shortest length, in order, and the others with the reason why not.

    A method refuses a budget below its smallest, or a profile without its section.
    """
    check_grid(grid.model_copy(update={"variants": (FULL,)}), subject, tokenizer, tasks)
    refused: dict[int, str] = {}
    sound = []
    for place, variant in enumerate(grid.variants):
        try:
            check_variant(variant, subject, min(grid.lengths))
        except (BudgetError, ConfigError) as error:
            refused[place] = str(error)
        else:
            sound.append((place, variant))
    if sound:
        sample = all_tasks(tasks)[grid.families[0]].make(
            tokenizer, min(grid.lengths), 0, seed=grid.seed, questions=grid.questions_per_context
        )
        record = subject.record(sample.ids, [variant for _, variant in sound])
        for place, variant in sound:
            try:
                subject.variant(variant).compress(record)
            except BudgetError as error:
                refused[place] = str(error)
    fitting = tuple(variant for place, variant in enumerate(grid.variants) if place not in refused)
    return fitting, tuple((grid.variants[place], why) for place, why in sorted(refused.items()))
