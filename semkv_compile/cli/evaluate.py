"""What `semkv eval` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from semkv.cli.common import INTERRUPTED, output_console, progress_bar
from semkv.cli.models import load_model
from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.evaluation.settings import Grid, QuestionMode, build_variants

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


def grid_of(request: EvalRequest) -> Grid:
    """The grid that a request asks for, after every check that needs no model. Raises ConfigError, BudgetError."""
    from semkv.evaluation.samples import check_lengths, families
    from semkv.methods import METHODS

    for method in request.methods:
        if method not in METHODS:
            raise ConfigError(f"unknown method {method!r}; there are: {', '.join(METHODS)}")
    for family in request.families:
        if family not in families():
            raise ConfigError(f"unknown family {family!r}; there are: {', '.join(families())}")
    if request.question not in QUESTIONS:
        raise ConfigError(f"--question {request.question!r}: expected one of {', '.join(QUESTIONS)}")
    check_lengths(request.lengths, None)
    return Grid(
        variants=build_variants(request.methods, request.budgets),
        families=tuple(dict.fromkeys(request.families)),
        lengths=tuple(dict.fromkeys(request.lengths)),
        questions=QUESTIONS[request.question],
        samples=request.samples,
        questions_per_context=request.questions_per_context,
        seed=request.seed,
    )


def rows_path(json: Path | None) -> Path | None:
    """Where the rows of a report at `json` are kept: `out.json` has `out.rows.jsonl`."""
    return None if json is None else json.with_suffix(".rows.jsonl")


def run_eval(request: EvalRequest) -> None:
    """Evaluate, print tables, write JSON and pictures."""
    grid = grid_of(request)
    loaded = load_model(request.model, request.profile, device=request.device)
    from semkv.evaluation.samples import check_lengths

    check_lengths(grid.lengths, getattr(getattr(loaded.model, "config", None), "max_position_embeddings", None))
    from semkv.api import compile as compile_model
    from semkv.evaluation.evaluate import evaluate
    from semkv.evaluation.identity import subject_identity
    from semkv.evaluation.tables import print_tables

    compressing = [v for v in grid.variants if v.budget is not None]
    first = compressing[0] if compressing else grid.variants[0]
    compiled = compile_model(
        loaded.model, loaded.profile, method=first.method, budget=first.budget, config=request.config
    )
    with progress_bar("evaluating") as progress:
        report = evaluate(
            compiled,
            loaded.tokenizer,
            grid,
            identity=subject_identity(loaded.model, loaded.profile, request.config, compiled.dtype),
            model=loaded.name,
            title=f"Retrieval with {loaded.name}",
            rows=rows_path(request.json),
            progress=progress,
        )
    if request.json is not None:
        request.json.parent.mkdir(parents=True, exist_ok=True)
        request.json.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print_tables(report, output_console())
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
