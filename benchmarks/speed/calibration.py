"""What all steps of `semkv-profile` take for a decoder of a billion parameters: pieces are measured on two small parts of it.

    python -m benchmarks.speed.calibration                       # under ten minutes on one core
    python -m benchmarks.speed.calibration --length 4096

The estimate that `semkv-profile` prints before it begins is made for a random Llama of `SMALL` layers and for one of `LARGE`, with the
default settings and one file of text; what a layer adds is the slope between the two, and the whole follows for all layers. Writes
benchmarks/results/calibration.json and docs/results/calibration.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.places import RESULTS
from benchmarks.speed.profiler_memory import CONFIG, random_ids
from semkv import bundled
from semkv.cli.common import quiet_libraries
from semkv.cli.profile_choice import CHOICE, choice_seconds
from semkv.cli.profile_estimate import duration
from semkv.evaluation import environment
from semkv.profiles.calibration import STEPS, CalibrationData, CalibrationSettings, Job, MeasureData, MeasureSettings
from semkv.profiles.calibration.calibrate import annotated_program
from semkv.profiles.calibration.estimate import estimate
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest, depths, lengths
from semkv.profiles.calibration.samples import SampleSet

SMALL, LARGE = 1, 3
"""Layers of the two parts."""
BAR_HOURS = 24.0


def job_of(layers: int, length: int) -> Job:
    """The part of that many layers, with random tokens in the place of all that the default settings read."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG | {"num_hidden_layers": layers})).eval()
    measures, training = MeasureSettings(length=length), CalibrationSettings(length=length)
    ids = random_ids(length + measures.steps, 1)
    question = NeedleQuestion(tuple(range(16)), tuple(range(16, 24)), tuple(range(40, 56)))
    needles = tuple(
        NeedleTest(ids[:tokens], (question,) * measures.needle_questions)
        for tokens in lengths(measures)
        for _ in depths(measures)
    )
    sample = SampleSet("random", (ids,) * measures.samples, (ids,) * measures.held_out)
    measured = MeasureData((sample,), needles, "random tokens", bundled.load()[1])
    sequence = random_ids(length + training.queries, 2)
    data = CalibrationData((sequence,) * training.sequences, (sequence,) * training.held_out, "random tokens")
    return Job(model, "random", "", data, training, measured, measures, program=annotated_program(model))


def seconds_of(layers: int, length: int) -> dict[str, float]:
    """Of each step, for the part of that many layers."""
    job = job_of(layers, length)
    made = estimate(job, STEPS, clock=time.process_time)
    print(f"{layers} layers: a pass {made.passes.seconds(length):.1f} s", file=sys.stderr, flush=True)
    return made.seconds | {CHOICE: choice_seconds(made.passes, bundled=False, length=length)}


def whole(small: float, large: float, layers: int) -> float:
    """Seconds of all layers from those of `SMALL` and of `LARGE`."""
    return small + max(0.0, large - small) / (LARGE - SMALL) * (layers - SMALL)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--length", type=int, default=8192, help="tokens of a sample")
    arguments = options.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)  # so that the time of the processor is that of a core
    started, begun = environment.now(), time.monotonic()
    small, large = (seconds_of(layers, arguments.length) for layers in (SMALL, LARGE))
    steps = {step: whole(small[step], large[step], CONFIG["num_hidden_layers"]) for step in small}
    for step, spent in steps.items():
        print(f"{step:>16} {duration(spent):>8}")
    total = sum(steps.values())
    print(f"{'together':>16} {duration(total):>8}; measured in {duration(time.monotonic() - begun)}")
    publish(steps, arguments, environment.describe(started, "cpu").model_dump(mode="json"))
    if total > BAR_HOURS * 3600:
        raise SystemExit(f"{total / 3600:.1f} h, more than {BAR_HOURS:g}")


def publish(steps: dict[str, float], arguments: argparse.Namespace, where: dict[str, Any]) -> None:
    """Write what was measured."""
    content = {"length": arguments.length, "config": CONFIG, "seconds": steps, "environment": where}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "calibration.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = [[f"`{step}`", f"{spent / 3600:.2f}"] for step, spent in steps.items()]
    write_document(
        "calibration",
        "# What a calibration takes for a decoder of a billion parameters",
        f"Hours of each step with the default settings and samples of {arguments.length:,} tokens, extrapolated by "
        f"`benchmarks/speed/calibration.py` from parts of {SMALL} and {LARGE} of the {CONFIG['num_hidden_layers']} layers of a random "
        "float32 Llama: time of the processor, on one core. Steps that stop when their halves agree count whole.",
        table(["step", "hours"], [*lines, ["together", f"{sum(steps.values()) / 3600:.1f}"]]),
        "## Provenance",
        measured_on(where | {"started": where["started"][:16]}),
    )


if __name__ == "__main__":
    main()
