"""Machine, versions, commit and command, for results that can be traced."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from semkv.evaluation.schema import Environment

PACKAGES = ("semkv", "torch", "transformers", "numpy")


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def processor() -> str:
    """The processor's marketing name where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


COMMIT = "SEMKV_COMMIT"
"""Environment variable that says the commit where the package is a copy outside of its checkout."""


def commit() -> str:
    """The checkout's commit, with `+changes` where tracked files differ; outside a checkout what `COMMIT` says, else `unknown`."""
    found = _of_checkout()
    return os.environ.get(COMMIT, found) if found == "unknown" else found


def _of_checkout() -> str:
    folder = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10
        )
        if head.returncode != 0:
            return "unknown"
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def command(program: str | None = None) -> str:
    """The command line, its program (or `program`) and what it was given an absolute path of by name, also behind a `KEY=`: folders of
    one machine tell nothing."""
    return shlex.join([program or Path(sys.argv[0]).name, *map(_named, sys.argv[1:])])


def _named(given: str) -> str:
    key, equals, value = given.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if os.path.isabs(value) else given


def describe(started: str, device: str = "cpu") -> Environment:
    """The environment of a run that began at `started` and ends now."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    accelerator = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return Environment(
        machine=f"{processor()}, {platform.system()} {platform.machine()}",
        cpus=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        accelerator=accelerator,
        python=platform.python_version(),
        versions=versions,
        commit=commit(),
        command=command(),
        started=started,
        finished=now(),
    )
