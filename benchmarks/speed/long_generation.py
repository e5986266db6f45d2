"""200,000 generated tokens in one state: is the budget held, does a step stay as quick, and does anything grow that should not?

    python -m benchmarks.speed.long_generation                      # resumable, a state saved every 20,000 tokens; hours, 4 GB of memory
    python -m benchmarks.speed.long_generation --tokens 600 --every 200 --methods mixed --out small.json --folder runs/small
    python -m benchmarks.speed.long_generation --page               # the page alone, from the results that are there

Two layers of the decoder of benchmarks/speed/decode_cpu.py, a budget of 1,024 tokens per KV head and layer, host tier in memory. A
prompt of 1,024 random tokens is read, then each token is drawn from the model's own distribution (a generator seeded by its place, so
that a resumed run draws the same). Claims, per method:

- the device holds at most the budget in every step, while a layer runs (`state.stats.peak_share`) and between steps, by the tensors
  that exist;
- the median of the last 10,000 steps is at most 1.3 times that of steps 10,000 to 20,000; beside it the same in time of the processor, as
  hours pass between the two and what else the machine does meanwhile counts in the first;
- the host tier has the same bytes per folded token at the end as at the beginning: its form's and its tables';
- no tensor and no thread is left behind: as many are alive at the end as after the first 20,000 tokens (but for a few that a step may
  or may not have made), and their bytes grow by what the tiers grow by.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import semkv
from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.pages import Output
from benchmarks.lib.places import RESULTS, ROOT
from benchmarks.speed.decode_cpu import OPTIONS, VOCAB, build, random_profile
from benchmarks.speed.resident_memory import anonymous
from semkv.evaluation.environment import describe, now
from semkv.runtime.budgets.costs import waiting_cost_bytes
from semkv.runtime.state import State

RESULT = RESULTS / "long_generation.json"
LAYERS, BUDGET, PROMPT = 2, 1024, 1024
TOKENS, EVERY, WINDOW = 200_000, 20_000, 10_000
BAR = 1.3
"""Largest ratio of the median of the last WINDOW steps to that of the second WINDOW steps."""
TABLE_BYTES, SLACK = 64, 1.25
"""Bytes of tables that a waiting token may take, where each is a unit; what is allocated for the host tier over what is stored."""
FEW = 16
"""Tensors that one step has made and another has not. What leaks leaks once in every step, or in every eighth, when tokens fold."""


def live_tensors() -> tuple[int, int]:
    """(tensors that the collector knows, bytes of their distinct storages); a capture's tensors without data do not count."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"]
    return len(found), sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def folded_tokens(state: State) -> int:
    """Tokens that wait in the host tier, over layers."""
    return sum(memory.spans.host_tokens.length for row in state.rows for memory in row.budgeted() if memory.spans)


class Run:
    """One method's generation: its state, step times and rows, in a folder from which a later process goes on.

    times, busy: milliseconds of every step, of a clock and of the processor, over all threads.
    """

    def __init__(self, method: str, folder: Path, every: int) -> None:
        self.method, self.every = method, every
        self.folder = folder / method
        self.folder.mkdir(parents=True, exist_ok=True)
        model = build(LAYERS)
        config = semkv.CompileConfig(floor=0)
        full = semkv.compile(model, random_profile(model), method="full", config=config)
        self.compiled = full.with_method(method, BUDGET, **OPTIONS[method])
        self.times, self.busy = array("d"), array("d")
        self.rows: list[dict[str, Any]] = []
        self.state = self._resume()

    @property
    def done(self) -> int:
        """Tokens generated so far."""
        return len(self.times)

    @property
    def _kept(self) -> dict[str, array[float]]:
        return {"times": self.times, "busy": self.busy}

    def _resume(self) -> State:
        if (self.folder / "rows.json").is_file():
            self.rows = json.loads((self.folder / "rows.json").read_text(encoding="utf-8"))
            for name, times in self._kept.items():
                times.frombytes((self.folder / f"{name}.{self.rows[-1]['generated']}").read_bytes())
            return self.compiled.load_state(self.folder / f"state.{self.done}")
        ids = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        return self.compiled.prefill(ids)

    def steps(self, tokens: int) -> Iterator[dict[str, Any]]:
        """Generate until there are `tokens`; a row after every `every`, once it can be resumed from."""
        started = self.done
        while self.done < tokens:
            self._step()
            if self.done % self.every == 0 or self.done == tokens:
                self.rows.append(self._row(self.done - started))
                self._save()
                yield self.rows[-1]

    def _step(self) -> None:
        generator = torch.Generator().manual_seed(self.done)
        token = torch.multinomial(self.state.logits.softmax(-1), 1, generator=generator)
        before, worked = time.perf_counter(), time.process_time()
        self.compiled.extend(self.state, token)
        self.times.append(1000 * (time.perf_counter() - before))
        self.busy.append(1000 * (time.process_time() - worked))

    def _row(self, here: int) -> dict[str, Any]:
        """Figures now; `here`: tokens that this process generated, as anonymous memory and live tensors are its own."""
        nbytes, count = self.state.nbytes, folded_tokens(self.state)
        tensors, tensor_bytes = live_tensors()
        cap = sum(row.whole_cap(row.tokens) for row in self.state.rows)
        last = min(WINDOW, self.every)
        return {
            "method": self.method,
            "generated": self.done,
            "here": here,
            "median_ms": statistics.median(self.times[-last:]),
            "busy_ms": statistics.median(self.busy[-last:]),
            "peak_share": self.state.stats.peak_share,
            "device_share": nbytes["device"] / cap,
            "host": nbytes["host"],
            "waiting": count,
            "host_per_token": nbytes["host"] / max(1, count),
            "anonymous": anonymous(),
            "tensors": tensors,
            "tensor_bytes": tensor_bytes,
            "threads": threading.active_count(),
        }

    def _save(self) -> None:
        """Write the state and all times under the number of tokens, then the rows that name them, then drop what was before."""
        self.state.save(self.folder / f"state.{self.done}")
        for name, times in self._kept.items():
            (self.folder / f"{name}.{self.done}").write_bytes(times.tobytes())
        new = self.folder / "rows.json.new"
        new.write_text(json.dumps(self.rows), encoding="utf-8")
        new.replace(self.folder / "rows.json")
        for old in self.folder.glob("*.[0-9]*"):
            if old.suffix != f".{self.done}":
                old.unlink()

    def claims(self) -> dict[str, Any]:
        """What the rows say about the claims; None where the run is too short to say."""
        first, last = self.rows[0], self.rows[-1]
        store = self.compiled.placement.budgeted[0]
        parts = self.compiled.placement.parts(store)
        form = sum(
            waiting_cost_bytes(store.part(part.first, part.last, 1.0), part.components, torch.float32) for part in parts
        )
        ratio, busy_ratio = (
            statistics.median(x[-WINDOW:]) / statistics.median(x[WINDOW : 2 * WINDOW])
            if self.done > 2 * WINDOW
            else None
            for x in (self.times, self.busy)
        )
        same = [
            row for row in self.rows if row["here"] >= self.every
        ]  # a process's own first row has what it allocates once
        return {
            "method": self.method,
            "generated": self.done,
            "ratio": ratio,
            "busy_ratio": busy_ratio,
            "largest_peak_share": max(row["peak_share"] for row in self.rows),
            "host_per_token": [first["host_per_token"], last["host_per_token"]],
            "form_per_token": form,
            "tensors": [same[0]["tensors"], same[-1]["tensors"]],
            "threads": [same[0]["threads"], same[-1]["threads"]],
            "anonymous_growth": same[-1]["anonymous"] - same[0]["anonymous"] if len(same) > 1 else None,
            "host_growth": same[-1]["host"] - same[0]["host"] if len(same) > 1 else None,
            "held": {
                "budget": max(max(row["peak_share"], row["device_share"]) for row in self.rows) <= 1,
                "time": None if ratio is None else ratio <= BAR,
                "host": all(form <= row["host_per_token"] <= form + TABLE_BYTES for row in self.rows if row["waiting"]),
                "tensors": same[-1]["tensors"] <= same[0]["tensors"] + FEW,
                "tensor_bytes": same[-1]["tensor_bytes"] - SLACK * same[-1]["host"]
                <= same[0]["tensor_bytes"] - same[0]["host"],
                "threads": same[-1]["threads"] <= same[0]["threads"],
            },
        }


def show(row: dict[str, Any]) -> None:
    """One line of the log."""
    mib = {key: row[key] / 2**20 for key in ("host", "anonymous", "tensor_bytes")}
    print(
        f"{now()} {row['method']:7}{row['generated']:>8} tokens, median {row['median_ms']:.2f} ms, {row['busy_ms']:.2f} of the "
        f"processor, peak {100 * row['peak_share']:.1f} % of the budget, host {mib['host']:.1f} MiB ({row['host_per_token']:.1f} "
        f"bytes a token), anonymous {mib['anonymous']:.1f} MiB, {row['tensors']} tensors of "
        f"{mib['tensor_bytes']:.1f} MiB, {row['threads']} threads",
        flush=True,
    )


def page(report: dict[str, Any]) -> Path:
    """docs/results/long_generation.md from the results."""
    lines = [
        [
            f"`{row['method']}`",
            f"{row['generated']:,}",
            f"{row['median_ms']:.1f}",
            f"{row['busy_ms']:.1f}",
            f"{100 * row['peak_share']:.1f}",
            f"{row['host'] / 2**20:,.0f}",
            f"{row['host_per_token']:.1f}",
            f"{row['anonymous'] / 2**20:,.0f}",
            str(row["tensors"]),
            str(row["threads"]),
        ]
        for row in report["rows"]
    ]
    claims = [
        [
            f"`{x['method']}`",
            f"{x['generated']:,}",
            *["-" if x[key] is None else f"{x[key]:.2f}" for key in ("ratio", "busy_ratio")],
            f"{100 * x['largest_peak_share']:.1f}",
            *["not said" if held is None else "yes" if held else "no" for held in x["held"].values()],
        ]
        for x in report["claims"]
    ]
    return write_document(
        "long_generation",
        "# Long generation in one state",
        f"Made by `benchmarks/speed/long_generation.py`: {LAYERS} layers with 8 KV heads of 128 and random float32 weights, a budget of "
        f"{BUDGET:,} tokens per KV head and layer, tokens drawn one by one; {TOKENS:,} are asked for. Times are of a clock; those of the "
        "processor, of all threads, stand beside them, as a machine that is shared has other work in between.",
        "## What has to hold",
        f"`ratio`: median step of the last {WINDOW:,} over that of steps {WINDOW:,} to {2 * WINDOW:,}, at most {BAR}; "
        "`processor`: the same in time of the processor. `budget`: never "
        "more on the device. `host`: bytes per waiting token are those of its form and tables throughout. `tensors`, `bytes`, `threads`: "
        "nothing is left behind.",
        table(
            [
                "",
                "generated",
                "ratio",
                "processor",
                "largest share of the budget, %",
                "budget",
                "time",
                "host",
                "tensors",
                "bytes",
                "threads",
            ],
            claims,
        ),
        "## As it went",
        "Step: median of the last steps, ms of a clock and of the processor. Host: MiB, and bytes per waiting token and layer. "
        "Anonymous: memory of the process, MiB.",
        table(
            ["", "generated", "step", "processor", "peak, %", "host", "a token", "anonymous", "tensors", "threads"],
            lines,
        ),
        "## Provenance",
        measured_on(report["environment"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--every", type=int, default=EVERY, help="tokens after which the state is saved")
    parser.add_argument("--methods", default="sekv,mixed")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "long_generation", help="where a later run goes on from"
    )
    output = Output(parser, RESULT, page)
    arguments = parser.parse_args()
    if output.page_alone(arguments):
        return
    started = now()
    rows: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []
    for method in arguments.methods.split(","):
        run = Run(method, arguments.folder, arguments.every)
        for row in run.steps(arguments.tokens):
            show(row)
        rows += run.rows
        claims.append(run.claims())
        print(json.dumps(claims[-1]), flush=True)
        report = {"environment": describe(started).model_dump(mode="json"), "rows": rows, "claims": claims}
        output.save(report, arguments.out)
        del run
    output.finish(arguments.out)


if __name__ == "__main__":
    main()
