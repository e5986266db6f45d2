"""`semkv-profile`: calibrate a model and write its profile."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from semkv.errors import ConfigError, SemkvError

BUNDLED = "bundled"
BUNDLED_SETTINGS: dict[str, Any] = {
    "length": 2048, "max_steps": 240, "sequences": 24, "held_out": 4, "learning_rate": 4e-3,
}  # fmt: skip
"""Defaults for the bundled model: a short run with a faster rate, under ten minutes on two cores."""

STEPS = ("sekv",)
"""What can be calibrated, in order."""

HELP = """Calibrate a model: train SeKV's router, zoom thresholds and rank gates on running text, the model itself
frozen, and write a profile that semkv.compile(model, profile, budget=...) takes.

MODEL is a Hugging Face name, a local folder, or 'bundled' (the default): the small trained model that comes with semkv,
with text that it generates itself.

Examples:

  semkv-profile -o bundled.profile

  semkv-profile meta-llama/Llama-3.1-8B --data books.txt --data code.jsonl --length 32768 -o llama.profile

A run that was interrupted goes on where it stopped when the command is repeated (OUT.resume.safetensors holds what it
needs).
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)
console = Console()


@app.command(help=HELP)
def profile(
    model: Annotated[str, typer.Argument(help="Hugging Face name, local folder, or 'bundled'.")] = BUNDLED,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the profile that is written.")] = ...,  # type: ignore[assignment]
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Text file, or .jsonl with a field 'text'; repeatable. 'bundled' makes its own."),
    ] = None,
    with_tasks: Annotated[
        bool,
        typer.Option(
            "--with-tasks", help="'bundled' only: haystacks with questions instead of prose alone (labelled)."
        ),
    ] = False,
    steps: Annotated[list[str] | None, typer.Option("--steps", help=f"What to calibrate: {', '.join(STEPS)}.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of context at the end of the curriculum.")] = None,
    queries: Annotated[int | None, typer.Option(help="Tokens behind each context that read it compressed.")] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Optimiser steps at most; held-out loss may stop earlier.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="Different training sequences per length.")] = None,
    random_init: Annotated[
        bool, typer.Option("--random-init", help="Start routers at random instead of from the keys themselves.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of initial values and the order of the data.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")] = "cpu",
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Go on from an interrupted run, or start anew and replace OUT.")
    ] = True,
    report: Annotated[Path | None, typer.Option(help="Folder for report.json and losses.png.")] = None,
) -> None:
    """See HELP."""
    from semkv.profiles.calibration import CalibrationSettings

    unknown = [step for step in steps or () if step not in STEPS]
    if unknown:
        raise ConfigError(f"--steps {unknown[0]!r} is unknown: it can be {', '.join(STEPS)}")
    values: dict[str, Any] = dict(BUNDLED_SETTINGS) if model == BUNDLED else {}
    given = {"length": length, "queries": queries, "max_steps": max_steps, "sequences": sequences}
    values |= {name: value for name, value in given.items() if value is not None}
    settings = CalibrationSettings.checked(**values, seed=seed, router_init="random" if random_init else "identity")
    checkpoint = output.with_name(output.name + ".resume.safetensors")
    _check_output(output, checkpoint, resume)
    for path in data or ():
        if not path.is_file():
            raise ConfigError(
                f"calibration file {path} does not exist: pass a text file or a .jsonl file with a 'text' field"
            )
    if model != BUNDLED and not data:
        raise ConfigError(f"--data is needed to calibrate {model!r}: pass running text, for example --data book.txt")
    if with_tasks and (model != BUNDLED or data):
        raise ConfigError(
            "--with-tasks makes the bundled model's own text: use it with MODEL 'bundled' and without --data"
        )
    _run(model, output, checkpoint, data, with_tasks, settings, device, report)


def _check_output(output: Path, checkpoint: Path, resume: bool) -> None:
    """Refuse to write over a finished profile, or drop the old run where that was asked for."""
    if resume:
        if output.exists() and not checkpoint.exists():
            raise ConfigError(f"{output} exists already: pass --restart to replace it, or give another name with -o")
        return
    checkpoint.unlink(missing_ok=True)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file: a profile is written to a folder, give another name with -o")


def _load(name: str, device: str) -> tuple[Any, Any]:
    """The model in evaluation mode, and its tokenizer."""
    if name == BUNDLED:
        from semkv import bundled

        own, tokenizer = bundled.load()
        return own.to(device), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {name!r} cannot be loaded ({str(error).splitlines()[0]}): expected a Hugging Face name, a local "
            "folder, or 'bundled'"
        ) from None
    return model.to(device).eval(), tokenizer


def _run(
    name: str,
    output: Path,
    checkpoint: Path,
    paths: list[Path] | None,
    with_tasks: bool,
    settings: Any,
    device: str,
    report: Path | None,
) -> None:
    from semkv.profiles.calibration import bundled_data, calibrate, text_data

    started = time.monotonic()
    model, tokenizer = _load(name, device)
    if paths:
        data = text_data(paths, tokenizer, settings)
    else:
        data = bundled_data(tokenizer, settings, with_tasks=with_tasks)
    console.print(f"{name}: {data.tokens:,} tokens ({data.description}), contexts of {settings.lengths} tokens")
    with _progress_bar() as bar:
        made = calibrate(
            model,
            data,
            settings,
            name=name,
            command=shlex.join(["semkv-profile", *sys.argv[1:]]),
            checkpoint=checkpoint,
            progress=_Reporter(bar),
        )
    made.profile.save(output)
    checkpoint.unlink(missing_ok=True)
    if report is not None:
        write_report(report, made.profile, made.history)
    _print_summary(made.profile)
    console.print(f"wrote {output} ({made.profile.nbytes / 1e6:.2f} MB) in {(time.monotonic() - started) / 60:.1f} min")


def _progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    return Progress(*columns, console=console)


class _Reporter:
    """Shows each phase of a calibration as a bar, with the latest losses."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.tasks: dict[str, Any] = {}

    def __call__(self, phase: str, done: int, total: int, figures: dict[str, float]) -> None:
        if phase not in self.tasks:
            self.tasks[phase] = self.bar.add_task(phase, total=total, completed=max(0, done - 1), figures="")
        shown = " ".join(f"{name} {value:.3g}" for name, value in figures.items())
        self.bar.update(self.tasks[phase], total=total, completed=done, figures=shown)


COLUMNS = (
    ("site", "site", "{:.0f}"),
    ("recall", "recall", "{:.2f}"),
    ("precision", "prec.", "{:.2f}"),
    ("zoom_rate", "zoomed", "{:.3f}"),
    ("caught", "caught", "{:.2f}"),
    ("oracle", "oracle", "{:.2f}"),
    ("key_rank", "k rank", "{:.1f}"),
    ("value_rank", "v rank", "{:.1f}"),
    ("threshold", "tau", "{:.2f}"),
    ("mined", "mined", "{:.3f}"),
)
LEGEND = """recall, prec.: zoomed spans against the targets of Eq. 12, at mined queries
zoomed: share of the spans above tau, a logit
caught: of the attention on spans, what the router takes when 6 % of the tokens
  may be unfolded; oracle: the most that can be taken
k rank, v rank: components that the gates keep; mined: share of the queries that
  attend to few, distant spans"""


def _print_summary(made: Any) -> None:
    """The table that a calibration ends with: losses, and figures per site on held-out text."""
    provenance = made.info.provenance
    losses = ", ".join(f"{name} {value:.4g}" for name, value in provenance.losses.items())
    console.print(f"held-out losses after {provenance.steps} steps: {losses}")
    table = Table(title="per site, held-out contexts", box=None, padding=(0, 1), pad_edge=False)
    for _, title, _ in COLUMNS:
        table.add_column(title, justify="right")
    for row in provenance.table:
        table.add_row(*(form.format(row[key]) for key, _, form in COLUMNS))
    console.print(table)
    console.print(LEGEND, highlight=False)


def write_report(folder: Path, made: Any, history: list[dict[str, float]]) -> None:
    """Write `report.json` (provenance and the held-out losses over the steps) and `losses.png` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"provenance": made.info.provenance.model_dump(mode="json"), "history": history}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in history[0] if name not in ("step", "total")]
    figure, axes = pyplot.subplots(1, len(names), figsize=(3.2 * len(names), 2.6), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names):
        axis.plot([row["step"] for row in history], [row[name] for row in history], marker=".")
        axis.set(title=f"{name}, held out", xlabel="step")
    figure.savefig(folder / "losses.png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Entry point of `semkv-profile`: errors that semkv raises on purpose are printed without a traceback."""
    try:
        app()
    except SemkvError as error:
        Console(stderr=True).print(f"semkv-profile: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


__all__ = ["app", "main", "write_report"]

if __name__ == "__main__":
    main()
