"""An evaluation from beginning to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semkv.evaluation import environment
from semkv.evaluation.report import build_report
from semkv.evaluation.runner import Progress, Refusal, run_grid
from semkv.evaluation.schema import Report
from semkv.evaluation.settings import Grid
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import Subject
from semkv.evaluation.tasks.base import Task


def evaluate(
    compiled: Any,
    tokenizer: Any,
    grid: Grid,
    *,
    identity: str,
    model: str = "model",
    title: str = "Evaluation",
    rows: str | Path | None = None,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
    tasks: Mapping[str, Task] | None = None,
    workers: int = 1,
    refusals: list[Refusal] | None = None,
    together: int = 1,
) -> Report:
    """Run what is missing of `grid` and return the report of all of it.

    Parameters
    ----------
    compiled: a `semkv.CompiledModel`; the grid's variants share its program.
    tokenizer: a Hugging Face tokenizer.
    identity: fingerprint of model, profile and dtypes; rows of another identity are not reused.
    rows: JSON Lines file of what is measured, continued where it exists; None keeps rows in memory.
    tasks: what the names in `grid.families` stand for, beside the bundled families; see `semkv.evaluation.tasks`.
    workers: processes that measure contexts side by side, for small models on a CPU; answers are the same, times are not.
    refusals: takes the variants whose budget is too small for one of the contexts; they are not in the report.
    together: contexts whose answers run in the same decode steps (`CompiledModel.step`), which takes less time and the memory of as many
        contexts; answers are the same within rounding, times of steps are each context's share.

    A KeyboardInterrupt ends the run early: the report of what there is comes back with `complete=False`.

    Raises ConfigError, BudgetError or InputError before any work where the grid cannot run; BudgetError where a context is refused
    and `refusals` is None. What was measured until then stays.
    """
    subject = Subject(compiled, identity)
    store = RowStore(rows)
    asked = {name: task for name, task in (tasks or {}).items() if name in grid.families}
    notes = [*notes, *(note for task in asked.values() for note in task.notes())]
    started = environment.now()
    try:
        run_grid(subject, tokenizer, grid, store, progress, asked, workers, refusals, together)
    except KeyboardInterrupt:
        notes = [*notes, "stopped before it was complete"]
    refused = [refusal.variant for refusal in refusals or ()]
    return build_report(
        grid.model_copy(update={"variants": tuple(v for v in grid.variants if v not in refused)}),
        identity,
        store,
        environment.describe(started, str(compiled.device)),
        title=title,
        model=model,
        notes=notes,
        tasks=asked,
    )
