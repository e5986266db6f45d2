"""The last step of `semkv-profile`: every method at every budget, measured, for `method="auto"` to choose from."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from semkv.cli.common import progress_bar
from semkv.errors import ConfigError

CHOICE = "choice"
TEXT_TASKS = ("niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multivalue")
"""What methods are compared on where the model is not the bundled one: RULER's needles in the user's own text."""


def run_choice(
    model: Any,
    tokenizer: Any,
    profile: Any,
    *,
    bundled: bool,
    data: Sequence[Path],
    length: int,
    command: str,
    rows: Path,
    workers: int | None = None,
) -> Any:
    """`profile` with its table of choices; `rows` keeps what is measured, for an interrupted run to go on.

    The bundled model answers its own task families; another model looks for needles in the first of the `data` files.
    workers: processes that measure contexts side by side; None: see `semkv.evaluation.workers.default_workers`.
    """
    from semkv.api import compile as compile_model
    from semkv.config import CompileConfig
    from semkv.evaluation.choice import Contest, choose
    from semkv.evaluation.identity import subject_identity
    from semkv.evaluation.tasks import build_tasks
    from semkv.evaluation.workers import default_workers
    from semkv.methods import METHODS
    from semkv.profiles.calibration.calibrate import versions
    from semkv.profiles.schema import Measured

    started = time.monotonic()
    methods = tuple(name for name, method in METHODS.items() if method.compresses)
    if bundled:
        contest, tasks, described = Contest(methods, length=length), {}, "the bundled model's task families"
    else:
        text = next((path for path in data if path.suffix != ".jsonl"), None)
        if text is None:
            raise ConfigError(
                "--steps choice hides needles in running text: pass --data with a plain text file, or leave `choice` out"
            )
        contest = Contest(methods, families=TEXT_TASKS, length=length)
        tasks = build_tasks(TEXT_TASKS, sources={"haystack": str(text)})
        described = f"needles in {text.name}"
    # Half precision is what the KV is kept in where models are served; in float32 every summary would look cheaper.
    settings = CompileConfig(kv_dtype="float16") if bundled else CompileConfig()
    compiled = compile_model(model, profile, method="full", config=settings)
    identity = subject_identity(model, profile, settings, compiled.dtype)
    workers = default_workers(model, compiled.device) if workers is None else workers
    with progress_bar(CHOICE) as progress:
        made = choose(
            compiled, tokenizer, contest, identity=identity, rows=rows, progress=progress, tasks=tasks, workers=workers
        )
    if not made.choices:
        raise ConfigError(f"no method could run at any budget with contexts of {length} tokens: {made.left_out[0]}")
    plain = dataclasses.asdict(contest)
    record = Measured(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        data=described,
        data_digest=hashlib.sha256(repr(sorted(plain.items())).encode()).hexdigest(),
        units=len(made.choices),
        wall_minutes=round((time.monotonic() - started) / 60, 3),
        versions=versions(),
        settings={name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
        note="; ".join(made.left_out)[:8000],
    )
    info = profile.info.model_copy(
        update={"choices": made.choices, "measured": {**profile.info.measured, CHOICE: record}}
    )
    return dataclasses.replace(profile, info=info)


def choice_table(console: Console, profile: Any) -> None:
    """Scores of methods by budget, the best of each first."""
    from semkv.cli.profile_tables import simple_table

    budgets = sorted({cell.budget for cell in profile.info.choices})
    table = simple_table(
        "accuracy (%) by budget; in brackets, questions per family", "method", *(f"{100 * b:g} %" for b in budgets)
    )
    cells = {(cell.method, cell.budget): cell for cell in profile.info.choices}
    names = sorted(
        {name for name, _ in cells}, key=lambda name: -sum(cells[name, b].score for b in budgets if (name, b) in cells)
    )
    for name in names:
        shown = []
        for budget in budgets:
            cell = cells.get((name, budget))
            best = cell is not None and profile.best_method(budget) == name
            text = "-" if cell is None else f"{100 * cell.score:.0f} ({cell.samples})"
            shown.append(f"{text} *" if best else text)
        table.add_row(name, *shown)
    console.print(table)
    console.print(
        "*: what method='auto' takes at this budget; -: below the method's smallest, or the profile lacks its part",
        highlight=False,
    )
