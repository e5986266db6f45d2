"""docs/results/gpu.md from what `gpu_suite.sh` wrote: what ran on a GPU, how fast resident entries are read, and what a step takes.

python benchmarks/gpu_page.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decode_step import AHEAD, DYNAMIC, PLAIN, ROOT, TEXT
from gpu_table import LARGE, read
from grids import measured_on, table, write_document

RESULTS = ROOT / "benchmarks" / "results"
SHARE, RATIO = 0.8, 1.25
"""Of the copy bandwidth that a large call is to reach; times the best other's time that a small one may take."""


def kernel_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each call of ours on exact entries its line, with `best`: the time of the fastest other that reads the same bytes."""
    others = [x for x in report["lines"] if not x["reader"].startswith("semkv")]
    return [
        x | {"best": min(y["us"] for y in others if (y["entries"], y["rows"]) == (x["entries"], x["rows"]))}
        for x in report["lines"]
        if x["reader"] == "semkv"
    ]


def verdict(met: Iterable[bool]) -> str:
    met = list(met)
    return "met" if all(met) else f"met in {sum(met)} of {len(met)}" if any(met) else "missed"


def kernels_part(report: dict[str, Any]) -> list[str]:
    """Reading resident entries."""
    own = kernel_rows(report)
    large, small = [x for x in own if x["nbytes"] >= LARGE], [x for x in own if x["nbytes"] < LARGE]
    lines = [
        [
            f"{x['entries']:,}", str(x["rows"]), f"{x['nbytes'] / 2**20:.0f}", f"{x['us']:.0f}", f"{x['rate'] / 1e9:.0f}",
            f"{100 * x['share']:.0f}", f"{x['best']:.0f}", f"{x['us'] / x['best']:.2f}",
        ]
        for x in own
    ]  # fmt: skip
    mixed = [
        [f"{x['entries']:,}", f"{x['nbytes'] / 2**20:.0f}", f"{x['us']:.0f}", f"{100 * x['share']:.0f}"]
        for x in report["lines"]
        if x["reader"] == "semkv, exact and coarse"
    ]
    heads, kv_heads, dim = report["shape"]
    return [
        "## Reading resident entries",
        f"One query token, {heads} query heads, {kv_heads} KV heads of {dim}, {report['dtype']}; keys and values in three blocks, as the "
        f"runtime has them. A copy on the device moves {report['copy_bandwidth'] / 1e9:,.0f} GB/s, bytes read and written counted. Beside "
        "it is PyTorch's SDPA on the same numbers in one piece (FlashInfer where it is installed), the faster of them. Times are of calls "
        "from Python, one after the other: a small call takes what the host takes to make it.",
        f"At least {100 * SHARE:.0f} % of the copy's bandwidth from {LARGE >> 20} MiB on: "
        f"**{verdict(x['share'] >= SHARE for x in large)}**. Below, at most {RATIO} times the best other's time: "
        f"**{verdict(x['us'] <= RATIO * x['best'] for x in small)}**.",
        table(
            ["entries", "rows", "MiB", "us", "GB/s", "of a copy, %", "SDPA, us", "times SDPA's"],
            lines,
        ),
        "With a quarter as many coarse entries in 4 bits, each with a bias:",
        table(["entries", "MiB", "us", "of a copy, %"], mixed),
    ]  # fmt: skip


def steps_part(report: dict[str, Any]) -> list[str]:
    """Decode steps."""
    shown = [x for x in report["results"] if x["missing"] is None and x["first_ms"] is None]
    first = {x["cell"]["name"]: x for x in report["results"] if x["first_ms"] is not None}
    missing = [x for x in report["results"] if x["missing"] is not None]
    time_of = {(x["cell"]["name"], x["cell"]["tokens"], x["cell"]["budget"], x["cell"]["rows"]): x for x in shown}
    lines = []
    for (name, tokens, budget, rows), x in time_of.items():
        theirs = time_of.get((DYNAMIC, tokens, None, rows))
        lines.append([
            name, f"{tokens:,}", str(rows), "-" if budget is None else f"{100 * budget:g} %" if budget < 1 else f"{budget:,}",
            f"{x['median_ms']:.2f}", f"{x['p99_ms']:.2f}", f"{x['busy_ms']:.2f}", f"{x['floor_ms']:.2f}",
            "-" if theirs is None else f"{theirs['median_ms'] / x['median_ms']:.1f}",
            f"{x['device_bytes'] / 2**20:,.0f}", f"{x['moved_bytes'] / 2**20:.1f}",
            "-" if x["overlap"] is None else f"{100 * x['overlap']:.0f}",
        ])  # fmt: skip
    columns = ["", "tokens", "rows", "budget", "step, ms", "99th percentile", "device busy, ms", "floor, ms"]
    columns += ["times faster than DynamicCache", "KV on the device, MiB", "moved, MiB", "there before, %"]
    model = report["model"]
    out = [
        "## A decode step",
        f"{model['num_hidden_layers']} layers of the shapes of Llama-3.1-8B with random weights in {report['dtype']}, states of random "
        f"keys and values. Medians. `{TEXT[2:]}`: a method pays for its own choice and takes one that overlaps so with the step before, as "
        f"text does; without, random keys make each step look elsewhere. `{PLAIN[2:]}`: no CUDA graphs. `{AHEAD[2:]}`: a thread fetches "
        "what the next step is likely to lack. *Device busy* is what kernels and copies take; the rest of a step is the host's, which "
        "chooses, keeps the slots and makes the calls. The *floor* is what the device's or the link's bandwidth allows.",
        table(columns, lines),
    ]
    if len(first) == 2:
        full, own = (first[name]["first_ms"] for name in ("first token, full cache", "first token, sekv"))
        out.append(f"A prompt of random ids to its first token: DynamicCache {full:,.0f} ms, `sekv` {own:,.0f} ms.")
    if missing:
        named = "; ".join(f"{x['cell']['name']}, {x['cell']['tokens']:,} tokens ({x['missing'][:90]})" for x in missing)
        out.append(f"Not measured: {named}.")
    return out


def main() -> None:
    suite, kernels, steps = (read(RESULTS / f"{name}.json") for name in ("gpu_suite", "mixed_attention", "decode_step"))
    if not (suite and kernels and steps):
        raise SystemExit(
            "benchmarks/results lacks gpu_suite.json, mixed_attention.json or decode_step.json: run gpu_suite.sh"
        )
    notes = (ROOT / "benchmarks" / "gpu_notes.md").read_text(encoding="utf-8")
    ran = [
        [x["step"], "passed" if x["status"] == 0 else f"exit {x['status']}", str(x["seconds"])] for x in suite["steps"]
    ]
    path = write_document(
        "gpu",
        "# On a GPU",
        f"Made by `benchmarks/gpu_suite.sh` and `benchmarks/gpu_page.py`: one {suite['environment']['accelerator']}.",
        notes,
        *kernels_part(kernels),
        *steps_part(steps),
        "## What ran",
        table(["step", "", "seconds"], ran),
        "## Provenance",
        measured_on(kernels["environment"]),
        measured_on(steps["environment"]),
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
