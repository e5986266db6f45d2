"""`semkv-profile`: calibrate a model and write its profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from semkv.cli.common import PhaseBars, Version, output_console, parse_size, plain_errors
from semkv.cli.models import BUNDLED, load_weights
from semkv.cli.profile_choice import CHOICE
from semkv.errors import ConfigError
from semkv.io.ranks import Ranks, launched, own_device

BUNDLED_SETTINGS: dict[str, Any] = {
    "length": 2048,
    "sequences": 12,
    "held_out": 4,
}
"""Training defaults for the bundled model, whose contexts are short."""
BUNDLED_MEASURES: dict[str, Any] = {
    "length": 2048,
    "samples": 20,
    "held_out": 2,
    "needle_lengths": 3,
    "needle_depths": 4,
    "head_dim": 24,
    "head_group": 1,
}
"""Measuring defaults for the bundled model, whose contexts are short: all steps take minutes on two cores."""

STEPS = ("taxonomy", "retrieval-heads", "layer-errors", "sketch", "sentences", "retrieval-head", "memory", "sekv")
"""What can be calibrated, in order; a test compares it with `semkv.profiles.calibration.STEPS`."""

QUESTION = 64
"""Tokens that are left for what is asked behind a context, where its length follows from the model's."""

ALL_STEPS = (*STEPS, CHOICE)
"""What `--steps` takes: the last compares the methods that the others made possible."""

OTHER_NAMES = {"router": "sekv"}
"""Names that `--steps` takes too: what a step trains, in place of the method that it is for."""

HELP = """Calibrate a model and write a profile that semkv.compile(model, profile, budget=...) takes. The model itself is
frozen; running text is all that is needed.

MODEL is a Hugging Face name, a local folder, a GGUF file, or 'bundled' (the default): the small trained model that comes with semkv,
with text that it generates itself.

Steps, in the order in which they run (--steps takes some of them, separated by commas; by default all run):

  taxonomy         how stable each KV head's attention is and how similar to other heads: anchors, volatile heads,
                   pivots and satellites (HeteroCache)

  retrieval-heads  which query heads look at the answer while it is generated, in needle tests (CompressKV)

  layer-errors     what each layer's output loses under extreme compression (CompressKV)

  sketch           codebooks that give every token a code of a few bytes, which finds what a query looks for

  sentences        where sentences end, for every token of the tokenizer (SentenceKV)

  retrieval-head   a one-layer head that foretells what the model attends to, distilled (SpeContext)

  memory           working memory and bytes per token, and from which lengths on layers have to leave a device for the host
                   (SpeContext)

  sekv             SeKV's router, zoom thresholds and rank gates, trained; 'router' names this step too

  choice           every method at 3, 5 and 10 % (bundled: 20 % too), measured: what method="auto" chooses from

Examples:

  semkv-profile -o bundled.profile

  semkv-profile meta-llama/Llama-3.1-8B --data books.txt --data code.jsonl --length 32768 -o llama.profile

  semkv-profile --steps taxonomy --tau-similar 0.3 -o bundled.profile --report pictures    # again, the rest is kept

Before it begins it says how long each step will take and how much memory; --dry-run ends there. With few contexts it settles for
less when the halves of them agree.

Under torchrun the processes share the contexts and end with what one would have made: `torchrun --nproc-per-node 8 -m
semkv.cli.profile MODEL ...`; with --device cuda each takes the GPU of its number.

A run that was interrupted goes on where it stopped when the command is repeated, also in the middle of a step
(OUT.resume holds what it needs, OUT appears or changes at the end). Each --data file that is long enough counts as a data
set of its own: taxonomy and layer errors are compared across them.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class _Request:
    """What the command line asked for, checked. base: the profile at `output` whose other sections are kept."""

    model: str
    output: Path
    work: Path
    steps: tuple[str, ...]
    chosen: bool
    base: Any
    data: Sequence[Path]
    with_tasks: bool
    settings: Any
    measures: Any
    device: str
    report: Path | None
    workers: int | None
    latents: bool
    length_given: bool
    dry_run: bool
    ranks: Ranks


@app.command(help=HELP)
def profile(
    model: Annotated[str, typer.Argument(help="Hugging Face name, local folder, GGUF file, or 'bundled'.")] = BUNDLED,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the profile that is written.")] = ...,  # type: ignore[assignment]
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Text file, or .jsonl with a field 'text'; repeatable. 'bundled' makes its own."),
    ] = None,
    with_tasks: Annotated[
        bool,
        typer.Option(
            "--with-tasks", help="'bundled' only: SeKV trains on haystacks with questions, not prose alone (labelled)."
        ),
    ] = False,
    steps: Annotated[
        list[str] | None,
        typer.Option(
            "--steps",
            help=f"What to calibrate: {', '.join(ALL_STEPS)}, separated by commas; 'router' is 'sekv'. On a profile that exists, "
            "these sections are made again and all others stay.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of context, or what the model holds where that is less; default 8192, bundled 2048."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Contexts that heads are measured on at most, over all data sets; default 9, bundled 20."),
    ] = None,
    needle_lengths: Annotated[
        int | None, typer.Option(help="Context lengths of needle tests; default 4, bundled 3.")
    ] = None,
    needle_depths: Annotated[
        int | None, typer.Option(help="Depths of needle tests, at each length; default 5, bundled 4.")
    ] = None,
    tau_stable: Annotated[
        float | None, typer.Option(help="Stability from which a head alone is an anchor, not volatile; default 0.5.")
    ] = None,
    tau_similar: Annotated[
        float | None, typer.Option(help="Overlap from which two heads are similar; default 0.5.")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="memory: size of the device that thresholds are for, as 24GB or 16GiB; default: the CUDA device's, else 24GB."
        ),
    ] = None,
    queries: Annotated[
        int | None, typer.Option(help="sekv: queries of each context that are trained on; default 64.")
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(help="sekv: optimiser steps of each layer at most; it may stop earlier; default 150."),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(help="sekv: contexts that are trained on; default 8, bundled 12.")
    ] = None,
    random_init: Annotated[
        bool,
        typer.Option(
            "--random-init", help="sekv: start routers at random instead of from what queries and keys share."
        ),
    ] = False,
    latents: Annotated[
        bool,
        typer.Option(
            "--latents",
            help="Models with multi-head latent attention (DeepSeek): calibrate for CompileConfig(latents=True), whose memory holds "
            "one latent per token in place of each head's keys and values.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the data, of initial values and of the order of training.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")] = "cpu",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the steps will take on this machine, and end.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--restart",
            help="Go on from an interrupted run, or forget it and start anew: without --steps, OUT is replaced whole.",
        ),
    ] = True,
    report: Annotated[Path | None, typer.Option(help="Folder for report.json and pictures of every section.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="choice: processes that measure contexts side by side; default: one per thread for small models on a CPU, else 1."
        ),
    ] = None,
    version: Version = False,
) -> None:
    """See HELP."""
    with plain_errors(), launched() as ranks:
        named = _named(steps or ())
        from semkv.profiles.calibration import CalibrationSettings, MeasureSettings
        from semkv.profiles.calibration.steps import forget

        training = {"length": length, "queries": queries, "max_steps": max_steps, "sequences": sequences}
        measuring = {
            "length": length,
            "samples": samples,
            "needle_lengths": needle_lengths,
            "needle_depths": needle_depths,
            "tau_stable": tau_stable,
            "tau_similar": tau_similar,
            "device_memory": parse_size(device_memory, "--device-memory"),
        }
        defaults = (BUNDLED_SETTINGS, BUNDLED_MEASURES) if model == BUNDLED else ({}, {})
        settings = CalibrationSettings.checked(
            **_over(defaults[0], training), seed=seed, router_init="random" if random_init else "covariance"
        )
        measures = MeasureSettings.checked(**_over(defaults[1], measuring), seed=seed)
        here = own_device(device, ranks)
        if here != "cpu":
            from semkv.capture.device import usable

            usable(here)
        if workers is not None:
            import torch

            from semkv.evaluation.workers import check_workers

            check_workers(workers, torch.device(here))
        work = output.with_name(output.name + ".resume")
        chosen = tuple(step for step in ALL_STEPS if step in named) or ALL_STEPS
        if not (resume or dry_run):
            forget(work)
        base = None if dry_run else ranks.from_first(lambda: _check_output(output, work, bool(named), resume))
        _check_data(model, data, with_tasks)
        _run(
            _Request(
                model,
                output,
                work,
                chosen,
                bool(named),
                base,
                tuple(data or ()),
                with_tasks,
                settings,
                measures,
                here,
                report,
                workers,
                latents,
                length is not None,
                dry_run,
                ranks,
            )
        )


def _named(entries: Sequence[str]) -> list[str]:
    """The steps that `--steps` names; `ConfigError` names an unknown one."""
    written = [part.strip() for entry in entries for part in entry.split(",") if part.strip()]
    unknown = [step for step in written if step not in ALL_STEPS and step not in OTHER_NAMES]
    if unknown:
        others = ", ".join(f"{name} ({step})" for name, step in OTHER_NAMES.items())
        raise ConfigError(f"--steps {unknown[0]!r} is unknown: it can be {', '.join(ALL_STEPS)}; or {others}")
    return [OTHER_NAMES.get(step, step) for step in written]


def _over(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return defaults | {name: value for name, value in given.items() if value is not None}


def _check_output(output: Path, work: Path, chosen: bool, resume: bool) -> Any:
    """The profile at `output` whose other sections are kept, or None; refuses to replace a finished one unasked."""
    from semkv.profiles.schema import Profile

    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file: a profile is written to a folder, give another name with -o")
    if chosen and output.exists():
        return Profile.load(output)
    if resume and output.exists() and not work.exists():
        raise ConfigError(
            f"{output} exists already: pass --steps to make some of its sections again, --restart to replace it, or give "
            "another name with -o"
        )
    return None


def _check_data(model: str, data: list[Path] | None, with_tasks: bool) -> None:
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


def _fitted(request: _Request, model: Any) -> _Request:
    """With contexts no longer than the model holds with what is read behind them, where no length was asked for."""
    held = getattr(model.config, "max_position_embeddings", None)
    room = max(request.settings.queries, request.measures.steps) + QUESTION
    if request.length_given or held is None or request.measures.length + room <= held:
        return request
    length = {"length": max(64, (held - room) // 64 * 64)}
    return replace(
        request,
        settings=request.settings.model_copy(update=length),
        measures=request.measures.model_copy(update=length),
    )


def _job(request: _Request, console: Console, model: Any, tokenizer: Any) -> Any:
    """The data of the steps that were asked for, with the model."""
    from semkv.profiles.calibration import Job, bundled_data, bundled_measure_data, text_data, text_measure_data

    data = measured = None
    if "sekv" in request.steps:
        if request.data:
            data = text_data(request.data, tokenizer, request.settings)
        else:
            data = bundled_data(tokenizer, request.settings, with_tasks=request.with_tasks)
        console.print(
            f"sekv: {data.tokens:,} tokens ({data.description}), contexts of {request.settings.length} tokens"
        )
    if set(request.steps) - {"sekv", CHOICE}:
        if request.data:
            measured = text_measure_data(request.data, tokenizer, request.measures)
        else:
            measured = bundled_measure_data(tokenizer, request.measures)
        tests = (
            f"{sum(len(test.questions) for test in measured.needles)} needle tests in {len(measured.needles)} contexts"
        )
        console.print(
            f"other steps: {len(measured.measured)} contexts of {request.measures.length} tokens, {len(measured.held_out)} "
            f"held out, {tests} ({measured.description})"
        )
    from semkv.evaluation.environment import command as command_line
    from semkv.profiles.calibration.calibrate import annotated_program

    name = Path(request.model).name if Path(request.model).is_absolute() else request.model
    return Job(
        model,
        name,
        command_line("semkv-profile"),
        data,
        request.settings,
        measured,
        request.measures,
        request.latents,
        annotated_program(model, latents=request.latents),
    )


def _run(request: _Request) -> None:
    from semkv.cli.profile_estimate import print_estimate
    from semkv.cli.profile_pictures import write_report
    from semkv.cli.profile_tables import print_step
    from semkv.profiles.calibration.steps import Finished, forget

    started = time.monotonic()
    ranks = request.ranks
    console = output_console() if ranks.first else Console(quiet=True)
    model, tokenizer = load_weights(request.model)
    model = model.to(request.device)
    request = _fitted(request, model)
    job = _job(request, console, model, tokenizer)
    steps = tuple(step for step in request.steps if step != CHOICE)
    if not steps and request.base is None:
        raise ConfigError(f"--steps {CHOICE} compares methods for a profile that exists: {request.output} does not")
    if ranks.first:
        print_estimate(console, job, request.steps, request.workers, ranks)
    if request.dry_run:
        return
    made = Finished(request.base, [], {}) if not steps else _calibrated(request, job, steps)
    for step in steps:
        if step not in made.skipped:
            print_step(console, step, made.profile, made.notes[step])
    if CHOICE in request.steps:
        made = replace(made, profile=_with_choice(request, console, model, tokenizer, made.profile, job.command))
    ranks.gather()  # none is at work in the folder
    forget(request.work)
    if not ranks.first:
        return
    if request.report is not None:
        files = write_report(request.report, made.profile, made.history)
        console.print(f"wrote {', '.join(files)} to {request.report}")
    minutes = _minutes(made.profile, request.steps)
    console.print(
        f"wrote {request.output} ({made.profile.nbytes / 1e6:.2f} MB) in {(time.monotonic() - started) / 60:.1f} min"
        f" ({minutes})"
    )
    for step in made.skipped:
        console.print(f"{step} was left out: {made.notes[step]}", style="yellow", highlight=False)
    if request.chosen and made.skipped:
        raise ConfigError(f"--steps {made.skipped[0]} has no result: {made.notes[made.skipped[0]]}")


def _calibrated(request: _Request, job: Any, steps: tuple[str, ...]) -> Any:
    """The profile with the sections of `steps`, saved."""
    from semkv.profiles.calibration import run_steps

    if not request.ranks.first:
        return run_steps(job, steps, profile=request.base, work=request.work, ranks=request.ranks)
    with PhaseBars() as bars:
        made = run_steps(
            job,
            steps,
            profile=request.base,
            work=request.work,
            report=bars,
            begin=lambda step: bars.close(),
            ranks=request.ranks,
        )
    made.profile.save(request.output)
    return made


def _with_choice(request: _Request, console: Console, model: Any, tokenizer: Any, profile: Any, command: str) -> Any:
    """The profile with the methods compared, saved."""
    from semkv.cli.profile_choice import choice_table, run_choice

    try:
        made = run_choice(
            model,
            tokenizer,
            profile,
            bundled=request.model == BUNDLED,
            data=request.data,
            length=request.measures.length,
            command=command,
            rows=request.work / "choice.rows.jsonl",
            workers=request.workers,
            latents=request.latents,
            ranks=request.ranks,
        )
    except ConfigError as error:
        if request.chosen:
            raise
        console.print(f"{CHOICE} was left out: {error}", style="yellow", highlight=False)
        return profile
    if request.ranks.first:
        made.save(request.output)
        choice_table(console, made)
    return made


def _minutes(made: Any, steps: Sequence[str]) -> str:
    """Minutes of each step."""
    spent = {step: record.wall_minutes for step, record in made.info.measured.items()}
    if made.info.provenance is not None:
        spent["sekv"] = made.info.provenance.wall_minutes
    return ", ".join(f"{step} {spent[step]:.1f}" for step in steps if step in spent)


def main() -> None:
    """Entry point of `semkv-profile`."""
    app()


__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
