"""docs/results/gpu.md from what `gpu_suite.sh` wrote: what ran on a GPU, how fast resident entries are read, and what a step takes.

python -m benchmarks.speed.gpu_page
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.speed.decode_step import DYNAMIC, PLAIN, ROOT, TEXT, THEIRS
from benchmarks.speed.gpu_table import LARGE, read

RESULTS = ROOT / "benchmarks" / "results"
MIDDLE = 131_072
"""Tokens of the steps that the page speaks of first."""
LAYOUT = ("block", "warps", "stages", "registers")
SHARED = 0.1
"""Of the KV, the budget of `decode_step.py`."""
SHARE, RATIO, FLOORS, FIRST = 0.8, 1.25, 1.5, 1.1
"""Of the copy bandwidth that a large call is to reach; times the best other's time that a small one may take, its floor that a step may,
the median that its 99th percentile may, and the full cache's time that a first token may."""


def verdict(met: Iterable[bool]) -> str:
    met = list(met)
    return "met" if all(met) else f"met in {sum(met)} of {len(met)}" if any(met) else "missed"


def layouts_part(report: dict[str, Any], bandwidth: float) -> list[str]:
    """The fastest layout of each shape beside SDPA. bandwidth: of a copy, bytes per second."""
    heads, kv_heads, dim = report["shape"]
    fastest: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        own = fastest.setdefault((row["entries"], row["rows"], row["coarse"]), {})
        if row["reader"] not in own or row["us"] < own[row["reader"]]["us"]:
            own[row["reader"]] = row
    tried = {
        tuple(row[name] for name in LAYOUT) for row in report["rows"] if row["reader"] == "semkv" and not row["coarse"]
    }
    lines = []
    for (entries, rows, coarse), best in fastest.items():
        own, sdpa = best["semkv"], best["SDPA"]
        read_bytes = 2 * rows * kv_heads * (entries * dim * 2 + coarse * (dim // 2 + 2))
        lines.append(
            [
                f"{entries:,}",
                str(rows),
                f"{coarse:,}" if coarse else "-",
                f"{own['us']:.1f}",
                f"{sdpa['us']:.1f}",
                f"{own['us'] / sdpa['us']:.2f}",
                f"{100 * read_bytes / (own['us'] / 1e6) / bandwidth:.0f}",
                f"{own['block']} entries, {own['warps']} warps, {own['stages']} stages, {own['registers']} registers, "
                f"{own['splits']} splits",
            ]
        )
    return [
        "## Layouts of the kernel",
        f"What the device takes for one query token of {heads} query heads and {kv_heads} KV heads of {dim} in {report['dtype']}, with the "
        f"fastest of {len(tried)} layouts, each with several numbers of splits; the defaults are made after them. SDPA reads the exact "
        "entries in one piece, and no coarse ones. A copy "
        f"on the device moves {bandwidth / 1e9:,.0f} GB/s, bytes read and written counted; the aims are {100 * SHARE:.0f} % of it from "
        f"{LARGE >> 20} MiB on, and below {RATIO} times SDPA's time.",
        table(["entries", "rows", "coarse", "us", "SDPA, us", "times SDPA's", "of a copy, %", "fastest layout"], lines),
    ]


def kernels_part(report: dict[str, Any]) -> list[str]:
    """Reading resident entries."""
    exact = {(x["entries"], x["rows"], x["reader"]): x for x in report["lines"] if "coarse" not in x["reader"]}
    own = [
        x | {"best": min(y["us"] for (*at, name), y in exact.items() if at == [entries, rows] and name != "semkv")}
        for (entries, rows, reader), x in exact.items()
        if reader == "semkv"
    ]
    large, small = [x for x in own if x["nbytes"] >= LARGE], [x for x in own if x["nbytes"] < LARGE]
    lines = [
        [
            f"{x['entries']:,}",
            str(x["rows"]),
            f"{x['nbytes'] / 2**20:.0f}",
            f"{x['us']:.0f}",
            f"{x['rate'] / 1e9:.0f}",
            f"{100 * x['share']:.0f}",
            f"{x['best']:.0f}",
            f"{x['us'] / x['best']:.2f}",
            f"{x['call_us']:.0f}",
        ]
        for x in own
    ]
    mixed = [
        [
            f"{x['entries']:,}",
            f"{x['nbytes'] / 2**20:.0f}",
            f"{x['us']:.0f}",
            f"{100 * x['share']:.0f}",
            f"{x['call_us']:.0f}",
        ]
        for x in report["lines"]
        if x["reader"] == "semkv, exact and coarse"
    ]
    heads, kv_heads, dim = report["shape"]
    return [
        "## Reading resident entries",
        f"One query token, {heads} query heads, {kv_heads} KV heads of {dim}, {report['dtype']}; keys and values in three blocks, as the "
        f"runtime has them. A copy on the device moves {report['copy_bandwidth'] / 1e9:,.0f} GB/s, bytes read and written counted. Beside "
        "it is PyTorch's SDPA on the same numbers in one piece (FlashInfer where it is installed), the faster of them. Times are the "
        "device's; `call` is that of a call from Python.",
        f"At least {100 * SHARE:.0f} % of the copy's bandwidth from {LARGE >> 20} MiB on: "
        f"**{verdict(x['share'] >= SHARE for x in large)}**. Below, at most {RATIO} times the best other's time: "
        f"**{verdict(x['us'] <= RATIO * x['best'] for x in small)}**.",
        table(["entries", "rows", "MiB", "us", "GB/s", "of a copy, %", "SDPA, us", "times SDPA's", "call, us"], lines),
        "With a quarter as many coarse entries in 4 bits, each with a bias:",
        table(["entries", "MiB", "us", "of a copy, %", "call, us"], mixed),
    ]


def summary(report: dict[str, Any], tokens: int) -> str:
    """What the steps at `tokens` tokens say, in words."""
    at = {(x["cell"]["name"], x["cell"]["budget"]): x for x in report["results"] if x["cell"]["tokens"] == tokens}
    time = {key: x["median_ms"] for key, x in at.items() if x["median_ms"] is not None}
    theirs = ", ".join(f"{name} {ms:.1f}" for (name, _), ms in time.items() if name in THEIRS)
    said = [
        f"- At {tokens:,} tokens a step of `full`, which keeps everything, takes {time['full', None]:.1f} ms; {theirs}."
    ]
    for (name, budget), x in at.items():
        if name.endswith(TEXT):
            said.append(
                f"- `{name.removesuffix(TEXT)}` with {100 * budget:g} % of the KV takes {x['median_ms']:.1f} ms, of which the device works "
                f"{x['busy_ms']:.1f}: {x['median_ms'] / x['floor_ms']:.1f} times its floor (aim {FLOORS}), with a 99th percentile of "
                f"{x['p99_ms'] / x['median_ms']:.1f} medians (aim {FLOORS})."
            )
    if ("full" + PLAIN, None) in time:
        said.append(
            f"- `full`{PLAIN}: {time['full' + PLAIN, None] / time['full', None]:.1f} times as long. It is not the default."
        )
    first = [at.get((f"first token, {kind}", budget)) for kind, budget in (("full cache", None), ("sekv", SHARED))]
    if all(first):
        ratio = first[1]["first_ms"] / first[0]["first_ms"]
        said.append(f"- A prompt takes {ratio:.1f} times as long to its first token with `sekv` (aim {FIRST}).")
    return "\n".join(said)


def steps_part(report: dict[str, Any]) -> list[str]:
    """Decode steps."""
    shown = [x for x in report["results"] if x["missing"] is None and x["first_ms"] is None]
    first = {x["cell"]["name"]: x for x in report["results"] if x["first_ms"] is not None}
    missing = [x for x in report["results"] if x["missing"] is not None]
    time_of = {(x["cell"]["name"], x["cell"]["tokens"], x["cell"]["budget"], x["cell"]["rows"]): x for x in shown}
    lines = []
    for (name, tokens, budget, rows), x in time_of.items():
        theirs = time_of.get((DYNAMIC, tokens, None, rows))
        lines.append(
            [
                name,
                f"{tokens:,}",
                str(rows),
                "-" if budget is None else f"{100 * budget:g} %" if budget < 1 else f"{budget:,}",
                f"{x['median_ms']:.2f}",
                f"{x['p99_ms']:.2f}",
                f"{x['busy_ms']:.2f}",
                f"{x['floor_ms']:.2f}",
                "-" if theirs is None else f"{theirs['median_ms'] / x['median_ms']:.1f}",
                f"{x['device_bytes'] / 2**20:,.0f}",
                f"{x['moved_bytes'] / 2**20:.1f}",
                "-" if x["overlap"] is None else f"{100 * x['overlap']:.0f}",
            ]
        )
    columns = ["", "tokens", "rows", "budget", "step, ms", "99th percentile", "device busy, ms", "floor, ms"]
    columns += ["times faster than DynamicCache", "KV on the device, MiB", "moved, MiB", "there before, %"]
    model = report["model"]
    out = [
        "## A decode step",
        f"{model['num_hidden_layers']} layers of the shapes of Llama-3.1-8B with random weights in {report['dtype']}, states of random "
        f"keys and values. Medians. `{TEXT[2:]}`: a method pays for its own choice and takes one that overlaps so with the step before, as "
        f"text does; without, random keys make each step look elsewhere. `{PLAIN[2:]}`: no CUDA graphs. *Device "
        "busy* is what kernels and copies take; the rest of a step is the host's, which chooses, keeps the slots and makes the calls. The "
        "*floor* is what the device's or the link's bandwidth allows.",
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
    names = ("gpu_suite", "decode_step", "layout_sweep", "mixed_attention")
    suite, steps, layouts, kernels = (read(RESULTS / f"{name}.json") for name in names)
    if not (suite and steps):
        raise SystemExit("benchmarks/results lacks gpu_suite.json or decode_step.json: run gpu_suite.sh")
    notes = (ROOT / "benchmarks" / "speed" / "gpu_notes.md").read_text(encoding="utf-8")
    ran = [
        [x["step"], "passed" if x["status"] == 0 else f"exit {x['status']}", str(x["seconds"])] for x in suite["steps"]
    ]
    path = write_document(
        "gpu",
        "# On a GPU",
        f"Made by `benchmarks/gpu_suite.sh`, `benchmarks/speed/layout_sweep.py` and `benchmarks/speed/gpu_page.py`, on one "
        f"{suite['environment']['accelerator']}.",
        summary(steps, MIDDLE),
        notes,
        *steps_part(steps),
        *(kernels_part(kernels) if kernels else []),
        *(layouts_part(layouts, steps["bandwidth"]["device"]) if layouts else []),
        "## What ran",
        table(["step", "", "seconds"], ran),
        "## Provenance",
        *(measured_on(one["environment"]) for one in (steps, kernels, layouts) if one),
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
