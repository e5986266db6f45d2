"""Decode steps of a real model: methods beside `full` at one length, and many conversations in one step beside one after the other.

    python -m benchmarks.speed.real_steps                              # SmolLM2 with its profile, 4,096 tokens and 16 conversations
    python -m benchmarks.speed.real_steps --tokens 1024 --rows 2 --steps 8 --out steps.json     # that it runs

The text is the manual of Python's language, which comes with the interpreter. All states of a part take turns, a few steps each, so that
what else the machine does meets all of them; each goes on with the token that it finds most likely. Medians and means of whole steps: from
the ids to the logits, with what happens between steps (folding, making room) in them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import semkv
from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.pages import Output
from benchmarks.lib.places import RESULTS, ROOT
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.quality.real import texts
from semkv.cli.models import load_model
from semkv.compiled import CompiledModel
from semkv.evaluation.environment import describe, now
from semkv.io.cache_folder import cache_folder
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.state import State

RESULT = RESULTS / "real_steps.json"
METHODS = ("full", "streaming_llm", "snapkv", "quest", "compresskv", "sentencekv", "sekv", "sketch", "specontext")
TOGETHER = ("full", "snapkv", "quest", "sketch")
BURST, WARM = 4, 3


def in_turns(steps: Mapping[str, Callable[[], None]], count: int) -> dict[str, list[float]]:
    """Milliseconds of `count` steps of each, in turns of `BURST`, after one each that brings its own data to the caches. Python's collector
    does not look through what was there before: it grows with the number of methods that are compared."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARM):
            step()
    gc.collect()
    gc.freeze()
    while len(next(iter(times.values()))) < count:
        for name, step in steps.items():
            step()
            for _ in range(BURST):
                started = time.perf_counter()
                step()
                times[name].append(1000 * (time.perf_counter() - started))
    gc.unfreeze()
    return times


def going_on(compiled: CompiledModel, state: State) -> Callable[[], None]:
    """A step of a state with what it finds most likely."""

    def step() -> None:
        compiled.extend(state, state.logits.argmax(-1, keepdim=True))

    return step


def alone(base: CompiledModel, record: RowRecord, methods: Sequence[str], budget: float, count: int) -> list[dict]:
    """Steps of each method on the same text."""
    steps = {}
    for name in methods:
        compiled = base if name == "full" else base.with_method(name, budget)
        steps[name] = going_on(compiled, compiled.compress(record))
    times = in_turns(steps, count)
    return [
        {
            "method": name,
            "median_ms": statistics.median(own),
            "mean_ms": statistics.fmean(own),
            "p95_ms": sorted(own)[int(0.95 * len(own))],
        }
        for name, own in times.items()
    ]


def together(base: CompiledModel, records: Sequence[RowRecord], name: str, budget: float, count: int) -> dict:
    """Tokens per second of many conversations in one step, and of one after the other."""
    compiled = base if name == "full" else base.with_method(name, budget)
    joined, apart = ([compiled.compress(record) for record in records] for _ in range(2))

    def all_at_once() -> None:
        compiled.step(joined, torch.cat([state.logits.argmax(-1) for state in joined]))

    def one_by_one() -> None:
        for state in apart:
            compiled.extend(state, state.logits.argmax(-1, keepdim=True))

    times = in_turns({"together": all_at_once, "apart": one_by_one}, count)
    speed = {way: 1000 * len(records) / statistics.median(own) for way, own in times.items()}
    means = {way: 1000 * len(records) / statistics.fmean(own) for way, own in times.items()}
    return {
        "method": name,
        "rows": len(records),
        "tokens_per_second": speed,
        "times": speed["together"] / speed["apart"],
        "times_by_means": means["together"] / means["apart"],
    }


def page(report: dict) -> Path:
    """docs/results/real_steps.md from the results."""
    full = next(row for row in report["alone"] if row["method"] == "full")
    lines = [
        [
            row["method"],
            f"{row['median_ms']:.1f}",
            f"{row['mean_ms']:.1f}",
            f"{row['p95_ms']:.1f}",
            f"{full['median_ms'] / row['median_ms']:.2f}",
            f"{full['mean_ms'] / row['mean_ms']:.2f}",
        ]
        for row in report["alone"]
    ]
    many = [
        [
            row["method"],
            str(row["rows"]),
            *[f"{row['tokens_per_second'][way]:.0f}" for way in ("apart", "together")],
            f"{row['times']:.2f}",
            f"{row['times_by_means']:.2f}",
        ]
        for row in report["together"]
    ]
    return write_document(
        "real_steps",
        "# A decode step of a real model",
        f"Made by `benchmarks/speed/real_steps.py`: {report['model']} in float32 on {report['threads']} thread(s) of a shared CPU, where "
        "ratios say more than milliseconds. Whole steps, from the ids to the logits, with the folding between them. The models of all "
        "methods are in one process; Python's garbage collector does not look through them while steps are timed.",
        f"## One conversation of {report['tokens']:,} tokens, {100 * report['budget']:g} % of the KV",
        "A step reads all weights whatever the method: what a method saves is of the rest. Methods that fold do so in all layers at once, "
        "every few tokens: what that costs is in the means and in the 95th percentile, not in the median.",
        table(["method", "median, ms", "mean, ms", "95th percentile", "times as fast as `full`", "by means"], lines),
        "## Many conversations in one step",
        f"Conversations of {report['lengths'][0]:,} to {report['lengths'][1]:,} tokens: `compiled.step` of all, and a step of each "
        "after the other; tokens per second.",
        table(["method", "conversations", "one by one", "together", "times", "by means"], many),
        "## Provenance",
        measured_on(report["environment"]),
    )


def main() -> None:
    """Measure, print a line for each, write the results and their page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=list(MODELS))
    parser.add_argument("--profile", type=Path, default=ROOT / "profiles" / "smollm2_135m", help="of the model")
    parser.add_argument("--tokens", type=int, default=4096, help="of the one conversation")
    parser.add_argument("--rows", type=int, default=16, help="conversations in one step")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--together", nargs="+", default=list(TOGETHER), help="methods of many conversations")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    output = Output(parser, RESULT, page)
    asked = parser.parse_args()
    if output.page_alone(asked):
        return
    started = now()
    torch.set_num_threads(asked.threads)
    loaded = load_model(str(fetch(MODELS[asked.model], cache_folder() / "models")), asked.profile)
    base = semkv.compile(loaded.model, loaded.profile, method="full", config=semkv.CompileConfig(floor=0))
    ids: Tensor = loaded.tokenizer(texts()["judged"]["manual"], return_tensors="pt").input_ids[0]

    def read(first: int, tokens: int) -> RowRecord:
        return base.prefill_record(ids[first : first + tokens], surprisal=True, all_queries=True)

    found = alone(base, read(0, asked.tokens), asked.methods, asked.budget, asked.steps)
    full = next((row for row in found if row["method"] == "full"), found[0])
    for row in found:
        faster, by_means = full["median_ms"] / row["median_ms"], full["mean_ms"] / row["mean_ms"]
        print(
            f"{row['method']:16}{row['median_ms']:8.1f} ms: {faster:.2f} times as fast as full, {by_means:.2f} by means",
            flush=True,
        )
    lengths = [1024 + 1024 * place // max(1, asked.rows - 1) for place in range(asked.rows)]
    records = [read(2048 * place, length) for place, length in enumerate(lengths)]
    many = []
    for name in asked.together:
        many.append(together(base, records, name, asked.budget, max(BURST, asked.steps // 2)))
        print(
            f"{name:16}{asked.rows} rows: {many[-1]['times']:.2f} times the tokens per second, {many[-1]['times_by_means']:.2f} by means",
            flush=True,
        )
    report = {
        "environment": describe(started).model_dump(mode="json"),
        "model": MODELS[asked.model].licence,
        "threads": asked.threads,
        "tokens": asked.tokens,
        "budget": asked.budget,
        "steps": asked.steps,
        "alone": found,
        "lengths": [min(lengths), max(lengths)],
        "together": many,
    }
    output.save(report, asked.out)
    output.finish(asked.out)


if __name__ == "__main__":
    main()
