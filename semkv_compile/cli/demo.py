"""What `semkv demo` does: the whole road on the bundled model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from semkv.cli.common import PhaseBars, output_console, progress_bar, quiet_libraries

METHODS = ("full", "streaming_llm", "snapkv", "sekv", "sketch")
EXAMPLE_SEED = 11


def run_demo(out: Path, length: int, budget: int | float, samples: int, contexts: int, seed: int) -> None:
    """Calibrate, compile, answer one question in sight, evaluate five methods, draw. Writes into `out`."""
    started = time.monotonic()
    quiet_libraries()
    from semkv.evaluation.settings import Grid, build_variants

    grid = Grid(
        variants=build_variants(METHODS, [budget]),
        families=("single", "multi", "confusable", "dense"),
        lengths=(length,),
        samples=samples,
        questions_per_context=4,
        seed=seed,
    )
    from semkv import bundled
    from semkv.api import compile as compile_model
    from semkv.config import CompileConfig
    from semkv.evaluation.samples import check_lengths

    console = output_console()
    model, tokenizer = bundled.load()
    check_lengths(grid.lengths, model.config.max_position_embeddings)
    sizes = model.config
    console.print(
        f"[bold]1. The bundled model[/bold]: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
        f"{sizes.num_hidden_layers} layers, {sizes.num_attention_heads} query and {sizes.num_key_value_heads} KV heads"
    )
    profile = _profile(console, model, tokenizer, out, contexts, length)
    console.print(f"\n[bold]3. Compile[/bold]: sketch, {grid.variants[-1].budget_text} of the full KV on the device")
    # The weights are stored in float16; the memory is measured against keys and values in the same.
    config = CompileConfig(kv_dtype="float16", floor=0)
    compiled = compile_model(model, profile, method="sketch", budget=budget, config=config)
    console.print(f"   {compiled}")
    _example(console, compiled, tokenizer, length, budget)
    console.print(
        f"\n[bold]5. Evaluate[/bold]: {samples} questions per family at {length} tokens, asked after compression"
    )
    _evaluate(console, compiled, model, tokenizer, profile, grid, out)
    console.print(f"\nDone in {(time.monotonic() - started) / 60:.1f} minutes.")


def _profile(console: Console, model: Any, tokenizer: Any, out: Path, contexts: int, length: int) -> Any:
    """The committed profile, or one calibrated into `out` (taken as it is where a former run finished it)."""
    from semkv import bundled
    from semkv.artifact.fingerprint import model_fingerprint
    from semkv.profiles.calibration import (
        CalibrationSettings,
        Job,
        MeasureSettings,
        bundled_measure_data,
        run_steps,
    )
    from semkv.profiles.calibration.steps import forget
    from semkv.profiles.schema import Profile

    if contexts == 0:
        console.print("\n[bold]2. Profile[/bold]: the committed one")
        return bundled.profile()
    folder, wanted = out / "profile", {"samples": contexts, "length": length}
    if (folder / "profile.json").is_file():
        found = Profile.load(folder)
        made = found.info.measured.get("sketch")
        if (
            found.fingerprint == model_fingerprint(model)
            and made is not None
            and wanted.items() <= made.settings.items()
        ):
            console.print(f"\n[bold]2. Profile[/bold]: {folder}, from a former run")
            return found
    console.print(
        f"\n[bold]2. Calibrate[/bold]: codebooks of the keys, from {contexts} contexts of {length} tokens of generated text"
    )
    measures = MeasureSettings.checked(**wanted, held_out=1)
    data = bundled_measure_data(tokenizer, measures)
    job = Job(model, "bundled", "semkv demo", None, CalibrationSettings(), data, measures)
    work = out / "calibration.resume"
    out.mkdir(parents=True, exist_ok=True)
    with PhaseBars("   ") as bars:
        profile = run_steps(job, ("sketch",), work=work, report=bars).profile
    profile.save(folder)
    forget(work)
    minutes = profile.info.measured["sketch"].wall_minutes
    console.print(f"   {minutes:.1f} minutes; written to {folder}")
    return profile


def _example(console: Console, compiled: Any, tokenizer: Any, length: int, budget: int | float) -> None:
    """One question about one context, answered by every method from the same prefill."""
    from semkv.evaluation.samples import make_sample
    from semkv.evaluation.subject import as_ids

    sample = make_sample(tokenizer, "confusable", length, 0, seed=EXAMPLE_SEED, questions=1)
    question = sample.questions[0]
    console.print(f"\n[bold]4. Ask[/bold]: {len(sample.ids)} tokens are read and compressed, then comes the question")
    console.print(f"   question: {question.text.strip()}")
    console.print(f"   stated at {100 * question.depth:.0f} % of the context; right answer: {question.answer_text}")
    record = compiled.prefill_record(as_ids(sample.ids), surprisal=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("   method", "answer", "KV on the device", "KV elsewhere"):
        table.add_column(name)
    from semkv.evaluation.tables import size

    for method in METHODS:
        variant = compiled.with_method(method, None if method == "full" else budget)
        state = variant.compress(record)
        out = variant.generate(
            as_ids(question.ids), state=state, max_new_tokens=len(question.answer), do_sample=False, pad_token_id=0
        )
        answer = tokenizer.decode(out[0, len(question.ids) :])
        nbytes = state.nbytes
        share = 100 * nbytes["peak"] / state.full_bytes
        table.add_row(
            f"   {method}", answer, f"{size(nbytes['peak'])} ({share:.1f} %)", size(nbytes["host"] + nbytes["disk"])
        )
    console.print(table)


def _evaluate(console: Console, compiled: Any, model: Any, tokenizer: Any, profile: Any, grid: Any, out: Path) -> None:
    from semkv.evaluation.evaluate import evaluate
    from semkv.evaluation.identity import subject_identity
    from semkv.evaluation.plots import draw_all
    from semkv.evaluation.tables import print_tables

    with progress_bar("evaluating") as progress:
        report = evaluate(
            compiled,
            tokenizer,
            grid,
            identity=subject_identity(model, profile, compiled.settings, compiled.dtype),
            model="the bundled model",
            title="Demo",
            rows=out / "results.rows.jsonl",
            progress=progress,
        )
    (out / "results.json").write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print_tables(report, console)
    for path in [out / "results.json", *draw_all(report, out)]:
        console.print(f"wrote {path}")
    if not report.complete:
        raise KeyboardInterrupt
