"""A measured calibration step: sums over samples that an interruption does not lose, then a section of the profile."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.profiles.schema import Profile

from . import checkpoint as files
from .checkpoint import Checkpoint
from .interpreter import Handler, run_body
from .measure_settings import MeasureSettings
from .samples import MeasureData

SAVE_SECONDS = 5.0
"""A checkpoint is written at most this often: what an interruption costs at the worst."""


@dataclass(frozen=True)
class Subject:
    """What a step measures: an annotated program, data that fits it, settings, and the profile so far."""

    program: Program
    data: MeasureData
    settings: MeasureSettings
    profile: Profile | None = None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.program.body.parameters()), torch.device("cpu"))

    @property
    def owners(self) -> tuple[AttentionSite, ...]:
        """For each KV store that a method may compress, the first site that reads it."""
        return tuple(site for site in self.program.stores if site.treatment == "method")

    def run(self, ids: Tensor, handler: Handler) -> None:
        """One pass over ids [T] without gradients; what it returns is not needed."""
        ids = ids.to(self.device)
        with torch.no_grad():
            run_body(self.program.body, ids, torch.arange(len(ids), dtype=torch.int64, device=self.device), handler)


@dataclass(frozen=True)
class Outcome:
    """What a step found: the fields of the profile that it sets, its tensors, and a note for people.

    section: None where the step could not measure this model; `note` then says why and what to do. units: that were measured.
    """

    section: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)
    note: str = ""
    units: int = 0


class Sums:
    """What was seen so far, by name, on the CPU: float64 sums, and rows of any dtype; a fixed order makes a resumed run equal to the
    bit."""

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors = dict(tensors or {})

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a tensor or a number under a name, whose shape is that of the first value."""
        value = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
        self.tensors[name] = self.tensors[name] + value if name in self.tensors else value.clone()

    def append(self, name: str, rows: Tensor) -> None:
        """Put rows [H, n, ...] behind those that are there under a name, or keep a tensor as it is."""
        rows = rows.detach().cpu().contiguous()
        self.tensors[name] = torch.cat([self.tensors[name], rows], 1) if name in self.tensors else rows

    def pop(self, name: str) -> Tensor:
        """What is under a name, which is forgotten."""
        return self.tensors.pop(name)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The sum, or None where nothing was added."""
        return self.tensors.get(name)


class Measure(ABC):
    """One step. `name` is what `--steps` takes, `field` the field of `ProfileInfo` and `prefix` that of its tensors."""

    name: ClassVar[str]
    field: ClassVar[str]
    prefix: ClassVar[str] = ""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.settings = subject.settings

    @property
    @abstractmethod
    def units(self) -> int:
        """How many units there are to measure: samples, tests."""

    @abstractmethod
    def measure(self, unit: int, sums: Sums) -> None:
        """Measure one unit and add what was seen."""

    @abstractmethod
    def finish(self, sums: Sums) -> Outcome:
        """The section that follows from all units."""

    def agreement(self, sums: Sums) -> float | None:
        """Expected correlation of what was found with what as many other units would find; None where all units are needed."""
        return None

    def figures(self, sums: Sums) -> dict[str, float]:
        """What the progress line shows."""
        return {}


Report = Callable[[str, int, int, dict[str, float]], None]


def run_measure(
    step: Measure, *, identity: str, path: Path | None, report: Report, save_seconds: float = SAVE_SECONDS
) -> Outcome:
    """Run the units of a step until it has enough, from its checkpoint at `path` where there is one of the same `identity`.

    Raises
    ------
    ConfigError: the checkpoint is damaged or of another run.
    """
    saved = files.read(path, identity) if path is not None else None
    sums = Sums(saved.tensors) if saved is not None else Sums()
    done = int(saved.state["units"]) if saved is not None else 0
    written = time.monotonic()
    for unit in range(done, step.units):
        if unit >= step.settings.least and (step.agreement(sums) or 0.0) >= step.settings.agreement:
            break
        step.measure(unit, sums)
        done = unit + 1
        if path is not None and time.monotonic() - written >= save_seconds:
            files.write(path, Checkpoint(sums.tensors, {"identity": identity, "units": unit + 1}))
            written = time.monotonic()
        report(step.name, unit + 1, step.units, step.figures(sums))
    return replace(step.finish(sums), units=done)


def agreed(agreement: float | None) -> str:
    """For the note of a step."""
    return (
        ""
        if agreement is None
        else f"half of the contexts against the other half: {agreement:.3f} expected correlation of all"
    )


def reliability(even: Tensor, odd: Tensor) -> float:
    """Spearman-Brown: what two halves' correlation says about the whole. even, odd [n]: the same figures from both halves."""
    both = torch.corrcoef(torch.stack([even.flatten().double(), odd.flatten().double()]))[0, 1]
    half = max(0.0, float(both.nan_to_num()))
    return 2 * half / (1 + half)
