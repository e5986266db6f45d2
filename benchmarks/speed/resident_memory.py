"""Anonymous resident memory with the disk tier: what a longer sequence adds in decode, and what a prefill adds to the idle model.

    python -m benchmarks.speed.resident_memory                      # everything, resumable; 12 GB of memory, 25 GB of disk
    python -m benchmarks.speed.resident_memory --layers 2 --lengths 1024,4096 --prompt 1024 --methods sekv --out small.json
    python -m benchmarks.speed.resident_memory --page               # the page alone, from the results that are there

Every figure is of a process of its own, and counts RssAnon of /proc/self/status: memory of the process that is not of a file, so
that neither the mapped files of the disk tier nor libraries count. A thread reads it every few milliseconds for the peak. Claims:

- decode: a state of random keys and values (benchmarks/speed/decode_cpu.py) takes steps. From the shorter to the longer length the peak
  during these steps grows by at most 15 % of what the full KV grows by. The state is made from files and everything but the budget
  waits in files; what making it takes is printed beside.
- prefill: `compiled.prefill` of a random prompt, in chunks, raises the peak over the idle compiled model by at most 15 % of the full KV
  plus that of one layer.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import semkv
from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.pages import Output
from benchmarks.lib.places import RESULTS
from benchmarks.speed.decode_cpu import FIXED, LAYERS, LONG, OPTIONS, SHORT, build, random_profile, synthetic_record
from semkv.evaluation.environment import commit, describe, now
from semkv.model.huggingface import CACHE
from semkv.runtime.host.tier import HostTier

RESULT = RESULTS / "resident_memory.json"
PLAIN = ("full", "DynamicCache")
"""Contenders that hold everything, for comparison."""
BAR = 0.15
BUDGETS = (0.1, FIXED)
SAMPLE_SECONDS = 0.002
CHUNK = 512
"""Tokens of a prompt that run at once: fewer than by default, as what a layer computes of a chunk is memory of the process too."""


def anonymous() -> int:
    """Bytes of this process's memory that are of no file."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


class Peak:
    """The largest `anonymous` while the body of the `with` runs."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.bytes = self.before = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, anonymous())

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous())


# -- one contender, in a process of its own ------------------------------------------------------------------------------


def decode(
    name: str, tokens: int, budget: float | int | None, *, layers: int, steps: int, folder: str | None
) -> dict[str, int]:
    """Bytes over `steps` decode steps of one contender from a state of `tokens` tokens."""
    model = build(layers)
    record = synthetic_record(tokens, layers, HostTier(disk=True, folder=folder))
    ids, at = torch.ones(1, 1, dtype=torch.int64), tokens
    step: Callable[[], Any]
    if name == "DynamicCache":
        with Peak() as making:
            cache = DynamicCache()
            for layer in range(layers):
                cache.update(record.keys[layer][None].clone(), record.values[layer][None].clone(), layer)

        @torch.no_grad()
        def step() -> None:
            nonlocal at
            model(ids, position_ids=torch.full((1, 1), at), use_cache=True, **{CACHE: cache})
            at += 1
    else:
        compiled = decoder_model(model, name, budget, folder)
        with Peak() as making:
            state = compiled.compress(record)

        def step() -> None:
            compiled.extend(state, ids)

    full = sum(x.nbytes for held in (record.keys, record.values) for x in held.values())
    del record
    with Peak() as stepping:
        for _ in range(steps):
            step()
    return {
        "before": making.before,
        "making": making.bytes,
        "made": stepping.before,
        "peak": stepping.bytes,
        "full": full,
    }


def decoder_model(model: Any, method: str, budget: float | int | None, folder: str | None) -> Any:
    """The decoder compiled with the disk tier."""
    config = semkv.CompileConfig(floor=0, host="disk", disk_folder=folder, prefill_chunk=CHUNK)
    full = semkv.compile(model, random_profile(model), method="full", config=config)
    return full if budget is None else full.with_method(method, budget, **OPTIONS[method])


def prefill(
    name: str, tokens: int, budget: float | int | None, *, layers: int, model: str, folder: str | None
) -> dict[str, int]:
    """Bytes over the prefill of `tokens` tokens; `layers` are those of the decoder, where that is the model."""
    if model == "bundled":
        config = semkv.CompileConfig(floor=0, host="disk", disk_folder=folder, prefill_chunk=CHUNK)
        compiled = semkv.compile(
            semkv.bundled.load()[0], semkv.bundled.profile(), method=name, budget=budget, config=config
        )
    else:
        compiled = decoder_model(build(layers), name, budget, folder)
    vocab = compiled.program.vocab_size
    ids = torch.randint(5, vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    compiled.prefill(ids[:, : min(1024, tokens)])  # what libraries allocate once is no part of a prefill
    with Peak() as reading:
        state = compiled.prefill(ids)
    full = state.full_bytes
    return {
        "before": reading.before,
        "peak": reading.bytes,
        "after": anonymous(),
        "full": full,
        "layer": full // len(compiled.program.stores),
    }


# -- all of them ---------------------------------------------------------------------------------------------------------


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is measured, the shortest first."""
    methods = arguments.methods.split(",")
    found = []
    for tokens in map(int, arguments.lengths.split(",")):
        found += [
            {"claim": "decode", "name": name, "tokens": tokens, "budget": budget, "layers": arguments.layers}
            for name in methods
            for budget in ((None,) if name in PLAIN else BUDGETS)
        ]
    bundled = arguments.prompt or semkv.bundled.load()[0].config.max_position_embeddings
    for name in methods:
        if name not in PLAIN:
            cell = {"claim": "prefill", "name": name, "budget": 0.1, "layers": arguments.layers}
            found.append(cell | {"model": "bundled", "tokens": bundled})
            if name in ("sekv", "sketch"):
                found.append(cell | {"model": "decoder", "tokens": arguments.prompt or 16_384})
    return found


def measure(cell: dict[str, Any], steps: int, folder: str | None) -> dict[str, int]:
    """The figures of one cell, from a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed.resident_memory",
        "--one",
        json.dumps(cell),
        "--steps",
        str(steps),
    ]
    command += [] if folder is None else ["--folder", folder]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def one(cell: dict[str, Any], steps: int, folder: str | None) -> dict[str, int]:
    """The figures of one cell, in this process."""
    facts = dict(cell)
    if facts.pop("claim") == "decode":
        return decode(**facts, steps=steps, folder=folder)
    return prefill(**facts, folder=folder)


def lacking(wanted: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that no row is of."""
    return [cell for cell in wanted if not any(cell.items() <= row.items() for row in rows)]


def growths(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per contender and budget: shares of the growth of the full KV, from the shortest to the longest length."""
    found = []
    decoded = [row for row in rows if row["claim"] == "decode"]
    for name, budget in dict.fromkeys((row["name"], row["budget"]) for row in decoded):
        own = sorted(
            (row for row in decoded if (row["name"], row["budget"]) == (name, budget)), key=lambda x: x["tokens"]
        )
        short, long = own[0], own[-1]
        if short is long:
            continue
        grown = long["full"] - short["full"]
        found.append(
            {
                "name": name,
                "budget": budget,
                "tokens": [short["tokens"], long["tokens"]],
                **{key: (long[key] - short[key]) / grown for key in ("making", "made", "peak")},
            }
        )
    return found


def excess(row: dict[str, Any]) -> float:
    """The growth of a prefill over the idle model that is more than a layer's KV, as a share of the full KV."""
    return (row["peak"] - row["before"] - row["layer"]) / row["full"]


def show(row: dict[str, Any]) -> None:
    """One line for one cell."""
    mib = {key: row[key] / 2**20 for key in ("before", "making", "made", "peak", "after", "full") if key in row}
    budget = "-" if row["budget"] is None else f"{row['budget']:g}"
    figures = "".join(f"{key} {value:,.0f}  " for key, value in mib.items())
    told = f"{100 * excess(row):.1f} % beside a layer" if row["claim"] == "prefill" else ""
    print(
        f"{row['claim']} {row.get('model', ''):8}{row['name']:13}{row['tokens']:>8}{budget:>8}  MiB: {figures}{told}",
        flush=True,
    )


def page(report: dict[str, Any]) -> Path:
    """docs/results/resident_memory.md from the results."""

    def said(budget: float | int | None) -> str:
        return "-" if budget is None else f"{100 * budget:g} %" if isinstance(budget, float) else f"{budget:,} tokens"

    def cell_said(cell: dict[str, Any]) -> str:
        where = "" if cell["budget"] is None else f", {said(cell['budget'])}"
        model = {"bundled": " of the bundled model", "decoder": " of 8 layers"}.get(cell.get("model", ""), "")
        return f"{cell['claim']}{model} with `{cell['name']}`, {cell['tokens']:,} tokens{where}"

    missing = "; ".join(map(cell_said, report["lacking"]))
    grown = [
        [
            f"`{x['name']}`" if x["name"] != "DynamicCache" else x["name"],
            said(x["budget"]),
            *[f"{100 * x[key]:.1f}" for key in ("peak", "made", "making")],
        ]
        for x in report["growth"]
    ]
    filled = [
        [
            f"`{row['name']}`",
            {"bundled": "bundled", "decoder": "8 layers"}[row["model"]],
            f"{row['tokens']:,}",
            *[f"{row[key] / 2**20:,.0f}" for key in ("full", "layer")],
            f"{(row['peak'] - row['before']) / 2**20:,.0f}",
            f"{100 * excess(row):.1f}",
        ]
        for row in report["rows"]
        if row["claim"] == "prefill"
    ]
    lengths = report["growth"][0]["tokens"]
    return write_document(
        "resident_memory",
        "# Anonymous resident memory with the disk tier",
        "Made by `benchmarks/speed/resident_memory.py`, each line in a process of its own: RssAnon, the memory of a process that is of no "
        f'file, sampled every {1000 * SAMPLE_SECONDS:g} ms. Folded tokens wait in mapped files (`host="disk"`), which do not count; on a '
        "machine without a GPU what the budget counts is memory of the process as well. The decoder has 8 layers with 8 KV heads of "
        "128 and random float32 weights.",
        *([f"Not measured yet: {missing}."] if missing else []),
        f"## Decode, from {lengths[0]:,} to {lengths[1]:,} tokens",
        "Growth as a share of the growth of the full KV, in percent. Bar: the peak during "
        f"{report['steps']} steps grows by at most {100 * BAR:g} %. `at rest`: before the first step; `making`: the peak while the "
        "state is made from keys and values in files. `full` and DynamicCache hold everything.",
        table(["", "budget", "peak in steps", "at rest", "making"], grown),
        "## Prefill",
        f"What a prefill of a random prompt, {CHUNK} tokens at a time, adds at its peak to the idle compiled model, MiB. Bar: at "
        f"most {100 * BAR:g} % of the full KV plus that of one layer; the last column is the growth beside that layer, as a share of the "
        "full KV. `bundled` is the bundled model at its longest, for every method; `8 layers` is the decoder of the table above.",
        table(["", "model", "tokens", "full KV", "a layer", "growth", "beside a layer, %"], filled),
        "## Provenance",
        measured_on(report["environment"]),
        f"Commits of the rows: {', '.join(dict.fromkeys(row['commit'] for row in report['rows']))}.",
    )


def earlier(out: Path) -> list[dict[str, Any]]:
    """The rows of an interrupted or earlier run."""
    return json.loads(out.read_text(encoding="utf-8"))["rows"] if out.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=f"{SHORT},{LONG}", help="tokens at which decode is measured")
    parser.add_argument(
        "--prompt", type=int, help="tokens of prefills; default: the bundled model's longest, and 16,384"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the decoder")
    parser.add_argument("--methods", default=",".join((*PLAIN, *OPTIONS)))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--folder", help="where the files of the disk tier are; default: the system's temporary folder")
    parser.add_argument("--again", action="store_true", help="measure what the results already have, too")
    output = Output(parser, RESULT, page)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(one(arguments.one, arguments.steps, arguments.folder)))
        return
    if output.page_alone(arguments):
        return
    started = now()
    wanted = cells(arguments)
    rows = (
        []
        if arguments.again
        else [row for row in earlier(arguments.out) if any(cell.items() <= row.items() for cell in wanted)]
    )
    for cell in lacking(wanted, rows):
        rows.append(cell | measure(cell, arguments.steps, arguments.folder) | {"commit": commit()})
        show(rows[-1])
        report = {
            "environment": describe(started).model_dump(mode="json"),
            "steps": arguments.steps,
            "bar": BAR,
            "rows": rows,
            "growth": growths(rows),
            "lacking": lacking(wanted, rows),
        }
        output.save(report, arguments.out)
    for growth in growths(rows):
        shares = ", ".join(f"{key} {100 * growth[key]:.1f} %" for key in ("peak", "made", "making"))
        print(
            f"{growth['name']:14}{'-' if growth['budget'] is None else growth['budget']:>8} of the full KV's growth: {shares}"
        )
    output.finish(arguments.out)


if __name__ == "__main__":
    main()
