"""`semkv bench`: methods timed on this machine, beside the floor of its bandwidths where they are given."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from semkv.cli.common import output_console, progress_bar, read_text

if TYPE_CHECKING:
    from semkv.config import CompileConfig
    from semkv.evaluation.bench import Timing
    from semkv.evaluation.settings import Variant
    from semkv.planning.decoder import Decoder
    from semkv.planning.machine import Machine


@dataclass(frozen=True)
class BenchRequest:
    """What the command was asked for. text: a file that the prompt is cut from; None: random tokens."""

    model: str
    profile: Path | None
    methods: list[str]
    budgets: list[int | float]
    tokens: int
    rows: int
    steps: int
    warmup: int
    config: CompileConfig
    generated: tuple[str, ...] = ("budgeted",)
    gpu: str | None = None
    text: Path | None = None
    device: str | None = None
    json: Path | None = None


def run_bench(request: BenchRequest) -> None:
    """Time each method at each budget on one prompt, print the table and write it where that was asked for."""
    from semkv.planning.machine import parse_machine

    machine = None if request.gpu is None else parse_machine(request.gpu)
    from semkv.api import compile as compile_model
    from semkv.cli.models import load_model
    from semkv.evaluation.bench import check_tokens, time_compiled
    from semkv.evaluation.environment import describe, now
    from semkv.planning.decoder import decoder_of

    entries = entries_of(request)
    text = None if request.text is None else read_text(request.text, "--text")
    started = now()
    loaded = load_model(request.model, request.profile, device=request.device)
    ids = prompt_ids(loaded, request, text)
    full = compile_model(loaded.model, loaded.profile, method="full", config=request.config)
    check_tokens(loaded.model, full, ids)
    timings = []
    with progress_bar("bench") as progress:
        for place, entry in enumerate(entries, 1):
            compiled = full if entry.method == "full" else full.with_method(entry.method, entry.budget, **entry.options)
            timing = time_compiled(compiled, ids, warmup=request.warmup, steps=request.steps)
            timings.append(replace(timing, method=entry.label))
            progress(place, len(entries), entry.label)
    dtype = str(full.dtype).removeprefix("torch.")
    decoder = None if machine is None else decoder_of(loaded.model.config, dtype=dtype)
    floors = [None if machine is None else floor_ms(timing, decoder, machine) for timing in timings]
    console = output_console()
    print_timings(console, timings, floors)
    if request.json is not None:
        environment = describe(started, str(full.device)).model_dump(mode="json")
        rows = [asdict(timing) | {"floor_ms": floor} for timing, floor in zip(timings, floors)]
        report = {"environment": environment, "model": loaded.name, "timings": rows}
        request.json.parent.mkdir(parents=True, exist_ok=True)
        request.json.write_text(json_module.dumps(report, indent=1) + "\n")
        console.print(f"\nreport: {request.json}")


def entries_of(request: BenchRequest) -> list[Variant]:
    """What is timed, each method at each budget and in each mode, once; `auto` is what the profile measured to be best there.

    Raises ConfigError: a method is unknown or lacks the mode, or no profile can tell what `auto` is.
    """
    from semkv.cli.models import load_profile
    from semkv.evaluation.settings import Variant, build_variants
    from semkv.methods import find_method
    from semkv.methods.auto import AUTO, measured_best

    found: dict[tuple[str, int | float | None], Variant] = {}
    for name in request.methods:
        if name == AUTO:
            profile = load_profile(request.model, request.profile)
            made = [Variant(method=measured_best(profile, budget), budget=budget) for budget in request.budgets]
        else:
            find_method(name)
            made = list(build_variants([name], request.budgets, request.generated))
        found |= {(variant.label, variant.budget): variant for variant in made}
    return list(found.values())


def prompt_ids(loaded: Any, request: BenchRequest, text: str | None) -> Any:
    """Ids [B, T], every row the same: the start of `text`, or random tokens of a fixed seed."""
    import torch

    from semkv.errors import ConfigError

    device = next(loaded.model.parameters()).device
    if text is None:
        vocabulary = loaded.model.config.get_text_config().vocab_size
        generator = torch.Generator(device="cpu").manual_seed(0)
        row = torch.randint(vocabulary, (1, request.tokens), generator=generator, dtype=torch.int64, device="cpu")
    else:
        row = torch.tensor(
            [loaded.tokenizer(text, add_special_tokens=False)["input_ids"][: request.tokens]],
            dtype=torch.int64,
            device="cpu",
        )
        if row.shape[1] < request.tokens:
            raise ConfigError(
                f"--text {request.text} has {row.shape[1]} tokens, fewer than the {request.tokens} asked for"
            )
    return row.expand(request.rows, -1).contiguous().to(device)


def floor_ms(timing: Timing, decoder: Decoder, machine: Machine) -> float:
    """The larger of bytes read over device bandwidth and bytes moved over link bandwidth, as measured in the run: the weights that a
    step reads and what was on the device, and what crossed the link for all rows."""
    held = timing.nbytes["peak"] + timing.nbytes["window"]
    read = decoder.read_bytes(timing.rows) + held
    return 1000 * max(read / machine.bandwidth, timing.rows * timing.moved_bytes / machine.link)


def print_timings(console: Console, timings: list[Timing], floors: list[float | None]) -> None:
    """Two tables with a line per method and budget: times and sizes, and what steps moved."""
    from semkv.cli.tables import simple_table
    from semkv.evaluation.bench import PERCENTILES
    from semkv.evaluation.tables import size

    percentiles = [f"p{p}" for p in PERCENTILES]
    first, on_disk = timings[0], any(timing.nbytes["disk"] for timing in timings)
    title = f"{first.rows} row(s) of {first.tokens:,} tokens, {len(first.step_ms)} steps; milliseconds"
    times = simple_table(
        title,
        "method",
        "budget",
        "first token",
        *percentiles,
        "floor",
        "tokens/s",
        "device",
        "% of full",
        "a layer holds",
        "a layer reads",
        "host",
        *(["disk"] if on_disk else []),
    )
    moves = simple_table("Folded tokens, per step", "method", "budget", "overlap", "moved")
    for timing, floor in zip(timings, floors):
        peak = timing.nbytes["peak"]
        named = timing.method, "-" if timing.budget is None else f"{timing.budget:g}"
        times.add_row(
            *named,
            f"{timing.first_ms:.0f}",
            *(f"{timing.percentile(p):.2f}" for p in PERCENTILES),
            "-" if floor is None else f"{floor:.2f}",
            f"{timing.tokens_per_second:,.1f}",
            size(peak),
            f"{100 * peak / timing.full_bytes:.1f}",
            f"{100 * timing.device_share:.1f} / {100 * timing.device_share_mean:.1f}",
            f"{100 * timing.attended_share:.1f} / {100 * timing.attended_share_mean:.1f}",
            size(timing.nbytes["host"]),
            *([size(timing.nbytes["disk"])] if on_disk else []),
        )
        moves.add_row(*named, f"{timing.overlap:.0%}", size(timing.moved_bytes))
    for table in (times, moves):
        table.columns[0].justify = "left"
        console.print(table)
    console.print(
        "device: the largest residency of a step, weights apart. A layer holds on the device, and reads: % of its full KV, "
        "the largest of all layers and steps / the mean. overlap: of what steps unfolded, what was there from the step before; "
        "the rest moved, within the step."
    )
    for timing in timings:
        if timing.excess_share:
            console.print(
                f"{timing.method}: of its full KV a layer holds {100 * timing.excess_share:.2f} / {100 * timing.excess_share_mean:.2f} % "
                "beyond the budget, tokens that follow the prompt."
            )
