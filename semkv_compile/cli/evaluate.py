"""What `semkv eval` does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from semkv.cli.common import INTERRUPTED, output_console, progress_bar
from semkv.cli.models import load_model, load_profile
from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.evaluation.settings import Grid, QuestionMode, build_variants, settle_auto

if TYPE_CHECKING:
    from semkv.evaluation.runner import Refusal
    from semkv.evaluation.tasks import Task

QUESTIONS: dict[str, tuple[QuestionMode, ...]] = {"unseen": ("unseen",), "seen": ("seen",), "both": ("unseen", "seen")}


@dataclass(frozen=True)
class EvalRequest:
    """The command line of `semkv eval`, parsed."""

    model: str
    profile: Path | None
    methods: list[str]
    budgets: list[int | float]
    lengths: list[int]
    families: list[str]
    question: str
    samples: int
    questions_per_context: int
    seed: int
    json: Path | None
    plot: Path | None
    config: CompileConfig
    device: str | None
    generated: tuple[str, ...] = ("budgeted",)
    tasks: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    chat: bool = False
    agreement: bool = False
    mass: bool = False
    workers: int = 1


def grid_of(request: EvalRequest) -> Grid:
    """The grid that a request asks for, after every check that needs no model.

    Raises ConfigError, BudgetError; ProfileError for a damaged profile that `auto` would read.
    """
    from semkv.evaluation.samples import check_lengths, families
    from semkv.evaluation.tasks import task_names
    from semkv.methods import METHODS
    from semkv.methods.auto import AUTO

    for method in request.methods:
        if method not in (*METHODS, AUTO):
            raise ConfigError(f"unknown method {method!r}; there are: {', '.join((*METHODS, AUTO))}")
    for family in request.families:
        if family not in families():
            raise ConfigError(f"unknown family {family!r}; there are: {', '.join(families())}")
    if request.question not in QUESTIONS:
        raise ConfigError(f"--question {request.question!r}: expected one of {', '.join(QUESTIONS)}")
    if request.families:
        check_lengths(request.lengths, None)
    names = task_names(request.tasks) if request.tasks else ()
    variants = build_variants(request.methods, request.budgets, request.generated)
    if AUTO in request.methods:
        variants = settle_auto(variants, load_profile(request.model, request.profile))
    return Grid(
        variants=variants,
        families=tuple(dict.fromkeys([*request.families, *names])),
        lengths=tuple(dict.fromkeys(request.lengths)),
        questions=QUESTIONS[request.question],
        samples=request.samples,
        questions_per_context=request.questions_per_context,
        seed=request.seed,
        agreement=request.agreement,
        mass=request.mass,
    )


def notes_of(grid: Grid) -> list[str]:
    """What stands behind `auto` in a grid."""
    from semkv.methods.auto import AUTO

    found = [f"{v.method} at {v.budget_text}" for v in grid.variants if v.label == AUTO]
    return [f"{AUTO}, as the profile measured: {', '.join(found)}"] if found else []


def source_places(given: list[str]) -> dict[str, str]:
    """`["squad=data/squad.json"]` as keys and places. Raises ConfigError."""
    places = {}
    for text in given:
        key, found, place = text.partition("=")
        if not (key and found and place):
            raise ConfigError(f"--source {text!r}: expected KEY=FILE or KEY=HUB_NAME; `semkv tasks` lists the keys")
        places[key] = place
    return places


def option_values(given: list[str]) -> dict[str, dict[str, str]]:
    """`["niah.depths=20"]` as values by task and option. Raises ConfigError."""
    values: dict[str, dict[str, str]] = {}
    for text in given:
        target, found, value = text.partition("=")
        task, dot, option = target.partition(".")
        if not (task and dot and option and found):
            raise ConfigError(f"--set {text!r}: expected TASK.OPTION=VALUE; `semkv tasks` lists the options")
        values.setdefault(task, {})[option] = value
    return values


def tasks_of(request: EvalRequest) -> dict[str, Task]:
    """The tasks that a request asks for, with their data and options. Raises ConfigError."""
    from semkv.evaluation.tasks import build_tasks

    sources, options = source_places(request.sources), option_values(request.options)
    if not request.tasks:
        if sources or options or request.chat:
            raise ConfigError(
                "--source, --set and --chat belong to --tasks: name the tasks, `--tasks ruler` for example"
            )
        return {}
    return build_tasks(request.tasks, sources=sources, options=options, chat=request.chat)


def rows_path(json: Path | None) -> Path | None:
    """Where the rows of a report at `json` are kept: `out.json` has `out.rows.jsonl`."""
    return None if json is None else json.with_suffix(".rows.jsonl")


def run_eval(request: EvalRequest) -> None:
    """Evaluate, print tables, write JSON and pictures."""
    grid, tasks = grid_of(request), tasks_of(request)
    loaded = load_model(request.model, request.profile, device=request.device)
    from semkv.evaluation.runner import all_tasks

    limit = getattr(getattr(loaded.model, "config", None), "max_position_embeddings", None)
    for family in grid.families:
        for length in grid.lengths:
            all_tasks(tasks)[family].check_length(length, limit)
    from semkv.api import compile as compile_model
    from semkv.evaluation.evaluate import evaluate
    from semkv.evaluation.identity import subject_identity
    from semkv.evaluation.tables import print_tables

    compressing = [v for v in grid.variants if v.budget is not None]
    first = compressing[0] if compressing else grid.variants[0]
    compiled = compile_model(
        loaded.model, loaded.profile, method=first.method, budget=first.budget, config=request.config
    )
    refusals: list[Refusal] = []
    with progress_bar("evaluating") as progress:
        report = evaluate(
            compiled,
            loaded.tokenizer,
            grid,
            identity=subject_identity(loaded.model, loaded.profile, request.config, compiled.dtype),
            model=loaded.name,
            title=f"{'Tasks' if tasks else 'Retrieval'} with {loaded.name}",
            rows=rows_path(request.json),
            progress=progress,
            notes=notes_of(grid),
            tasks=tasks,
            workers=request.workers,
            refusals=refusals,
        )
    if refusals and len(refusals) == len(compressing):
        raise BudgetError(refusals[0].why)
    if request.json is not None:
        request.json.parent.mkdir(parents=True, exist_ok=True)
        request.json.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print_tables(report, output_console())
    for refusal in refusals:
        typer.echo(f"left out: {refusal.variant.label} at {refusal.variant.budget_text}: {refusal.why}", err=True)
    if request.json is not None:
        typer.echo(f"results: {request.json}")
    if request.plot is not None and report.cells:
        from semkv.evaluation.plots import draw_all

        for path in draw_all(report, request.plot):
            typer.echo(f"picture: {path}")
    if not report.complete:
        hint = "run the same command to go on" if request.json else "with --json a later run goes on where this stopped"
        typer.echo(f"stopped before it was complete; {hint}", err=True)
        raise typer.Exit(INTERRUPTED)
