"""Peak memory and time of every step of `semkv-profile` for a random decoder of about a billion parameters.

    python -m benchmarks.speed.profiler_memory                     # every step, 8K tokens; an hour and more on one core
    python -m benchmarks.speed.profiler_memory --steps sketch      # one of them; the others' results stay
    python -m benchmarks.speed.profiler_memory --page              # the page alone, from the results that are there

Each step runs alone in a process of its own, which draws the weights, captures the model and reads one sample (`sketch`
one to measure and one held out; `sekv` two contexts and three optimiser steps of each layer). Peaks are those that the system counts
for the process, the model and its capture included. The bar is 16 GiB. Times are of the processor, so that other programs on the machine
do not count; what a whole calibration takes, benchmarks/speed/calibration.py says. Writes benchmarks/results/profiler_memory.json and
docs/results/profiler_memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.pages import Output
from benchmarks.lib.places import RESULTS
from semkv import bundled
from semkv.evaluation.environment import describe, now
from semkv.profiles.calibration import STEPS, CalibrationSettings, Job, MeasureSettings
from semkv.profiles.calibration.data import CalibrationData
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest
from semkv.profiles.calibration.samples import MeasureData, SampleSet
from semkv.profiles.calibration.steps import run_steps

RESULT = RESULTS / "profiler_memory.json"
BAR_GIB = 16
LENGTH = 8192
CONFIG: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


class Clock:
    """What each piece of work of a step took: (phase, pieces done, processor seconds since the one before)."""

    def __init__(self) -> None:
        self.last = time.process_time()
        self.events: list[tuple[str, int, float]] = []

    def report(self, phase: str, done: int, total: int, figures: dict[str, float]) -> None:
        """As `semkv.profiles.calibration.measure.Report`."""
        passed, self.last = time.process_time() - self.last, time.process_time()
        self.events.append((phase, done, round(passed, 2)))
        print(f"  {phase} {done}/{total}: {passed:.1f} s, peak {peak_gib():.2f} GiB", file=sys.stderr, flush=True)


def peak_gib() -> float:
    """The largest resident set of this process so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)


def random_model() -> LlamaForCausalLM:
    """The model in evaluation mode, float32."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def random_ids(tokens: int, seed: int) -> torch.Tensor:
    """Token ids int64 [tokens]."""
    return torch.randint(CONFIG["vocab_size"], (tokens,), generator=torch.Generator().manual_seed(seed))


def measure_data(settings: MeasureSettings, tokenizer: Any) -> MeasureData:
    """One sample, one held out, one needle test."""
    tokens = settings.length + settings.steps
    question = NeedleQuestion(tuple(range(16)), tuple(range(16, 24)), tuple(range(4000, 4016)))
    needle = NeedleTest(random_ids(settings.length, 3), (question,))
    sample = SampleSet("random", (random_ids(tokens, 1),), (random_ids(tokens, 2),))
    return MeasureData((sample,), (needle,), "random tokens", tokenizer)


def training_data(settings: CalibrationSettings) -> CalibrationData:
    """As many sequences to train on and held out as the settings ask for."""
    count = settings.sequences + settings.held_out
    made = tuple(random_ids(settings.length + settings.queries, 10 + i) for i in range(count))
    return CalibrationData(made[: settings.sequences], made[settings.sequences :], "random tokens")


def work(step: str, length: int) -> dict[str, Any]:
    """Run one step in this process."""
    torch.set_num_threads(1)
    model = random_model()
    with_model = peak_gib()
    measures = MeasureSettings.checked(length=length, samples=1, held_out=1)
    settings = CalibrationSettings.checked(length=length, max_steps=3, evaluate_every=3, sequences=1, held_out=1)
    job = Job(
        model,
        "random Llama",
        "",
        training_data(settings),
        settings,
        measure_data(measures, bundled.load()[1]),
        measures,
    )
    clock, before = Clock(), {}

    def begin(name: str) -> None:
        before.update(peak=peak_gib(), seconds=round(time.process_time(), 1))
        clock.last = time.process_time()

    finished = run_steps(job, (step,), report=clock.report, begin=begin)
    peak = peak_gib()
    return {
        "step": step,
        "peak_gib": peak,
        "peak_with_model_gib": with_model,
        "peak_with_capture_gib": before["peak"],
        "start_seconds": before["seconds"],
        "seconds": round(time.process_time(), 1),
        "events": clock.events,
        "parameters": sum(p.numel() for p in model.parameters()),
        "note": finished.notes[step],
        "under_bar": peak < BAR_GIB,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--steps", default=",".join(STEPS), help="steps to run, separated by commas")
    options.add_argument("--length", type=int, default=LENGTH, help="tokens of a sample")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    output = Output(options, RESULT, page)
    arguments = options.parse_args()
    if output.page_alone(arguments):
        return
    if arguments.worker:
        print(json.dumps(work(arguments.worker, arguments.length)))
        return
    torch.set_num_threads(1)  # what the workers use, for the record
    started = now()
    for step in arguments.steps.split(","):
        command = [
            sys.executable,
            "-m",
            "benchmarks.speed.profiler_memory",
            "--worker",
            step,
            "--length",
            str(arguments.length),
        ]
        print(f"{step}:", file=sys.stderr, flush=True)
        made = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if made.returncode:
            print(f"  failed with {made.returncode} (a negative number is the signal that ended it)", file=sys.stderr)
            continue
        row = json.loads(made.stdout)
        print(f"  peak {row['peak_gib']:.2f} GiB, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
        publish(row, arguments, started)
    output.finish(arguments.out)


def page(report: dict[str, Any]) -> Path:
    """docs/results/profiler_memory.md from the results."""
    rows = [
        [
            f"`{row['step']}`",
            f"{row['peak_gib']:.1f}",
            f"{row['seconds'] - row['start_seconds']:.0f}",
            row["environment"]["commit"],
        ]
        for row in report["steps"]
    ]
    largest = max(row["peak_gib"] for row in report["steps"])
    parameters = report["steps"][0]["parameters"] / 1e9
    return write_document(
        "profiler_memory",
        "# What semkv-profile takes for a decoder of a billion parameters",
        f"Made by `benchmarks/speed/profiler_memory.py`: random float32 weights of a Llama with {parameters:.2f} billion parameters, "
        f"samples of {report['length']:,} tokens, each step in a process of its own on one core. `peak`: the most memory that the process "
        f"ever held, model and capture included; the bar is {report['bar_gib']} GiB, the largest here {largest:.1f}. `seconds`: processor "
        "time of one sample (`sketch`: one more held out; `sekv`: two contexts and three optimiser steps of each layer); what a whole "
        "calibration takes is on [another page](calibration.md). `choice`, which trains nothing and answers questions with each "
        "method, is not among them: it takes the memory of prefilling and decoding.",
        table(["step", "peak, GiB", "seconds", "commit"], rows),
        "## Provenance",
        *dict.fromkeys(
            measured_on(row["environment"] | {"started": row["environment"]["started"][:16]}) for row in report["steps"]
        ),
    )


def publish(row: dict[str, Any], arguments: argparse.Namespace, started: str) -> None:
    """Put one step's result beside those of the others."""
    rows = json.loads(arguments.out.read_text())["steps"] if arguments.out.exists() else []
    row["environment"] = describe(started, "cpu").model_dump(mode="json")
    rows = [other for other in rows if other["step"] != row["step"]] + [row]
    rows.sort(key=lambda one: STEPS.index(one["step"]))
    content = {"bar_gib": BAR_GIB, "length": arguments.length, "config": CONFIG, "dtype": "float32", "steps": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
