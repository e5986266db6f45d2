"""Kill `semkv-profile bundled` in the middle of every step, start it again each time, and compare the profile that comes out.

    python -m benchmarks.speed.profile_resume          # about ten minutes on two cores
    python -m benchmarks.speed.profile_resume --page   # the page alone, from the results that are there

One run is left alone, and timed: the bar is 20 minutes. Another is killed (SIGKILL to it and its workers, which can run nothing more) once
in each step after the step's second report, `sekv` in both of its phases and `choice` well into its rows; the last start is let
go to its end. Both profiles must have the same tensors, byte for byte, and the same `profile.json` but for when, how long and by which
command they were made, and the digest that covers those. Exits with 1 where they differ. Writes
benchmarks/results/profile_resume.json and docs/results/profile_resume.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.pages import Output
from benchmarks.lib.places import RESULTS
from semkv.evaluation.environment import describe, now

RESULT = RESULTS / "profile_resume.json"
BAR_MINUTES = 20
REPORTS = {
    "taxonomy": 2,
    "retrieval-heads": 2,
    "layer-errors": 2,
    "sketch": 2,
    "sentences": 2,
    "retrieval-head": 2,
    "memory": 2,
    "teacher": 2,
    "train": 2,
    "choice": 4,
}
"""Phases in their order, and after which of their progress reports the run is killed."""
OF_THE_RUN = ("created", "wall_minutes", "command")
"""What a profile says of the run that made it."""


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The command, in a process group of its own."""
    command = [sys.executable, "-c", "from semkv.cli.profile import main; main()", "bundled", "-o", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def reports(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Progress reports as they are printed, and all other lines."""
    assert process.stderr is not None
    for line in process.stderr:
        yield line.decode(errors="replace").strip()


def run_whole(folder: Path) -> float:
    """Minutes of a run that is left alone."""
    begun = time.monotonic()
    process = start(folder)
    said = list(reports(process))
    if process.wait():
        raise SystemExit("\n".join(["semkv-profile failed:", *said[-20:]]))
    return (time.monotonic() - begun) / 60


def kill_in(phase: str, folder: Path) -> str:
    """Start or go on, kill in the middle of `phase`, and return its last report."""
    process = start(folder)
    seen = 0
    for line in reports(process):
        seen += line.startswith(f"{phase}:")
        if seen == REPORTS[phase]:
            os.killpg(process.pid, signal.SIGKILL)
            break
    if process.wait() != -signal.SIGKILL:
        raise SystemExit(f"semkv-profile ended with {process.returncode} before it was killed in {phase!r}")
    return line.removeprefix(f"{phase}:").strip()


def content(folder: Path) -> tuple[dict[str, Any], str]:
    """What `profile.json` says of the model, and SHA-256 of the tensors' file."""
    found = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    found.pop("digest")
    for made in (found["provenance"], *found["measured"].values()):
        for name in OF_THE_RUN:
            made.pop(name, None)
    return found, hashlib.sha256((folder / "tensors.safetensors").read_bytes()).hexdigest()


def measure() -> dict[str, Any]:
    """Both runs in a folder of their own, and what came of them."""
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name, "whole.profile"), Path(name, "killed.profile")
        minutes = run_whole(whole)
        print(f"left alone: {minutes:.1f} minutes (bar {BAR_MINUTES})", flush=True)
        places = {}
        for phase in REPORTS:
            places[phase] = kill_in(phase, killed)
            print(f"killed in {phase}, at {places[phase]}", flush=True)
        rest = run_whole(killed)
        print(f"started for the last time: {rest:.1f} minutes to the end", flush=True)
        (first, first_tensors), (second, second_tensors) = content(whole), content(killed)
        return {
            "minutes": round(minutes, 2),
            "bar_minutes": BAR_MINUTES,
            "killed": places,
            "last_minutes": round(rest, 2),
            "same_tensors": first_tensors == second_tensors,
            "differing_sections": [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)],
        }


def holds(report: dict[str, Any]) -> bool:
    return report["same_tensors"] and not report["differing_sections"] and report["minutes"] <= report["bar_minutes"]


def page(report: dict[str, Any]) -> Path:
    """docs/results/profile_resume.md from the results."""
    differing = ", ".join(report["differing_sections"]) or "none"
    tensors = "the same" if report["same_tensors"] else "NOT the same"
    return write_document(
        "profile_resume",
        "# semkv-profile, killed in every step",
        f"Made by `benchmarks/speed/profile_resume.py`: `semkv-profile bundled` with all steps took {report['minutes']:.1f} minutes when "
        f"left alone (bar {report['bar_minutes']}). Another run of it was killed with SIGKILL, workers and all, once in each of these "
        f"places and started again each time. The two profiles' tensors are {tensors}, byte for byte; sections of `profile.json` that "
        f"differ, but for when, how long and by which command they were made: {differing}.",
        table(["killed in", "at"], [[f"`{phase}`", place] for phase, place in report["killed"].items()]),
        "`teacher` and `train` are the two phases of `sekv`.",
        "## Provenance",
        measured_on(report["environment"]),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = Output(options, RESULT, page)
    arguments = options.parse_args()
    if output.page_alone(arguments):
        return
    started = now()
    report = {"environment": describe(started, "cpu").model_dump(mode="json"), **measure()}
    output.save(report, arguments.out)
    output.finish(arguments.out)
    if not holds(report):
        raise SystemExit(f"the profiles differ or took too long: see {arguments.out}")


if __name__ == "__main__":
    main()
