"""`semkv-profile` of SmolLM2-135M in one process and over several: whether the profiles are equal to the bit, and the time of each.

    python -m benchmarks.speed.calibration_ranks                                   # minutes on two cores
    python -m benchmarks.speed.calibration_ranks --processes 2 --length 2048 --samples 6 --steps taxonomy,sketch

Every process computes in one thread. The processes share this machine's cores, with whatever else runs: its load is written down.
Writes benchmarks/results/calibration_ranks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.places import RESULTS
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.quality.real import write_texts
from semkv import Profile
from semkv.evaluation.environment import describe, now
from semkv.io.cache_folder import cache_folder

WHEN = ("created", "command", "wall_minutes")
"""What two runs of one calibration differ in."""


def calibrated(arguments: list[str], output: Path, processes: int) -> dict[str, Any]:
    """Run the command with so many processes; seconds by the clock and of the processor, load of the machine, minutes of each step."""
    launch = [sys.executable, "-m"]
    if processes > 1:
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [*launch, "semkv.cli.profile", *arguments, "-o", str(output)]
    print("$", *command, flush=True)
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    profile = Profile.load(output)
    minutes = {step: record.wall_minutes for step, record in profile.info.measured.items()}
    if profile.info.provenance is not None:
        minutes["sekv"] = profile.info.provenance.wall_minutes
    return {
        "processes": processes,
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "load": [round(value, 1) for value in os.getloadavg()],
        "step_seconds": {step: round(60 * value, 1) for step, value in minutes.items()},
    }


def differences(one: Profile, other: Profile) -> list[str]:
    """Names of tensors and sections in which two profiles differ, but for when and how long they were made."""

    def content(profile: Profile) -> dict[str, Any]:
        values = profile.info.model_dump(mode="json")
        for record in (*values["measured"].values(), values["provenance"] or {}):
            for name in WHEN:
                record.pop(name, None)
        return values

    names = sorted(one.tensors.keys() | other.tensors.keys())
    tensors = [
        name
        for name in names
        if name not in one.tensors
        or name not in other.tensors
        or not torch.equal(one.tensors[name], other.tensors[name])
    ]
    first, second = content(one), content(other)
    return tensors + [name for name in first if first[name] != second[name]]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--steps", default="taxonomy,layer-errors,sketch,sentences,retrieval-head,sekv")
    options.add_argument("--length", type=int, default=512, help="tokens of a context")
    options.add_argument("--samples", type=int, default=4, help="contexts that are measured")
    options.add_argument("--sequences", type=int, default=2, help="contexts that sekv trains on")
    options.add_argument("--max-steps", type=int, default=6, help="optimiser steps of a layer")
    asked = options.parse_args()
    started = now()
    model = fetch(MODELS["smollm2"], cache_folder() / "models")
    with tempfile.TemporaryDirectory() as folder:
        texts = write_texts(Path(folder))["calibration"]
        arguments = [str(model), "--steps", asked.steps, "--length", str(asked.length), "--samples", str(asked.samples)]
        arguments += ["--sequences", str(asked.sequences), "--queries", "16", "--max-steps", str(asked.max_steps)]
        arguments += [part for path in texts for part in ("--data", str(path))]
        runs = [calibrated(arguments, Path(folder) / f"of-{count}", count) for count in (1, asked.processes)]
        alone, shared = (Profile.load(Path(folder) / f"of-{count}") for count in (1, asked.processes))
    different = differences(alone, shared)
    content = {
        "asked": vars(asked),
        "tensors": len(alone.tensors),
        "different": different,
        "runs": runs,
        "environment": describe(started).model_dump(mode="json"),
    }
    print(json.dumps({name: content[name] for name in ("tensors", "different", "runs")}, indent=1))
    if different:
        raise SystemExit(f"{asked.processes} processes made another profile than one: {', '.join(different[:5])}")
    (RESULTS / "calibration_ranks.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
