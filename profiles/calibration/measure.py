"""A measured calibration step: sums over samples that an interruption does not lose, then a section of the profile."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from semkv.io.ranks import ALONE, Ranks
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

    def largest(self, name: str, value: float) -> None:
        """Keep the largest of the numbers under a name."""
        known = self.tensors.get(name)
        self.tensors[name] = torch.tensor(
            value if known is None else max(value, float(known)), dtype=torch.float64, device="cpu"
        )

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


class Notes(Sums):
    """What one unit adds to `known`, in order, for every process to add in the order of the units: sums of many processes are those of
    one, to the bit. What is read is what was known before the unit."""

    def __init__(self, known: Sums) -> None:
        super().__init__(known.tensors)
        self.entries: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, name: str, value: Tensor | float) -> None:
        """See `Sums`."""
        self.entries.append(("add", (name, torch.as_tensor(value, dtype=torch.float64, device="cpu").detach())))

    def largest(self, name: str, value: float) -> None:
        """See `Sums`."""
        self.entries.append(("largest", (name, value)))

    def append(self, name: str, rows: Tensor) -> None:
        """See `Sums`."""
        self.entries.append(("append", (name, rows.detach().cpu().contiguous())))

    def pop(self, name: str) -> Tensor:
        """See `Sums`."""
        self.entries.append(("pop", (name,)))
        return self.tensors[name]


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

    def stage(self, unit: int) -> int:
        """Where the units that are like `unit` end: processes share them."""
        return self.units

    @abstractmethod
    def finish(self, sums: Sums) -> Outcome:
        """The section that follows from all units."""

    def agreement(self, sums: Sums) -> float | None:
        """Expected correlation of what was found with what as many other units would find; None where all units are needed."""
        return None

    def figures(self, sums: Sums) -> dict[str, float]:
        """What the progress line shows."""
        return {}


class Building(Measure):
    """A step whose first `building` units build on those before them. Processes share what such a unit reads of the model alone."""

    @property
    @abstractmethod
    def building(self) -> int:
        """How many do; a stage ends there."""

    @abstractmethod
    def prepare(self, unit: int) -> Any:
        """What it reads of the model."""

    @abstractmethod
    def prepared(self, unit: int, found: Any) -> None:
        """Take what a process prepared, before `unit` is measured."""


Report = Callable[[str, int, int, dict[str, float]], None]


def run_measure(
    step: Measure,
    *,
    identity: str,
    path: Path | None,
    report: Report,
    save_seconds: float = SAVE_SECONDS,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Run the units of a step until it has enough, from its checkpoint at `path` where there is one of the same `identity`.

    ranks: share the units; the first reads and writes the checkpoint.

    Raises
    ------
    ConfigError: the checkpoint is damaged or of another run.
    """
    saved = ranks.from_first(lambda: files.read(path, identity) if path is not None else None)
    sums = Sums(saved.tensors) if saved is not None else Sums()
    done = int(saved.state["units"]) if saved is not None else 0
    written = time.monotonic()
    for unit, measured in _turns(step, done, sums, ranks):
        if unit >= step.settings.least and (step.agreement(sums) or 0.0) >= step.settings.agreement:
            break
        measured()
        done = unit + 1
        if path is not None and ranks.first and time.monotonic() - written >= save_seconds:
            files.write(path, Checkpoint(sums.tensors, {"identity": identity, "units": unit + 1}))
            written = time.monotonic()
        report(step.name, unit + 1, step.units, step.figures(sums))
    return replace(step.finish(sums), units=done)


def _turns(step: Measure, done: int, sums: Sums, ranks: Ranks) -> Iterator[tuple[int, Callable[[], None]]]:
    """Each unit from `done` on, with what adds it to `sums` once those before it are there. Processes take a unit each, then exchange
    what they saw; where units build on each other, what they read of the model."""

    def noted(unit: int) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
        notes = Notes(sums)
        step.measure(unit, notes)
        yield notes.entries

    def add(_: int, entries: list[tuple[str, tuple[Any, ...]]]) -> None:
        for what, arguments in entries:
            getattr(sums, what)(*arguments)

    if ranks.count == 1:
        yield from ((unit, partial(step.measure, unit, sums)) for unit in range(done, step.units))
        return
    while done < step.units:
        end = step.stage(done)
        if isinstance(step, Building) and done < step.building:
            yield from _built(step, range(done, end), sums, ranks)
        else:
            yield from ((unit, partial(add, unit, found)) for unit, found in ranks.deal(range(done, end), noted))
        done = end


def _built(step: Building, units: range, sums: Sums, ranks: Ranks) -> Iterator[tuple[int, Callable[[], None]]]:
    """`_turns` of units that build on each other."""

    def prepare(unit: int) -> Iterator[Any]:
        yield step.prepare(unit)

    def measure(unit: int, found: Any) -> None:
        step.prepared(unit, found)
        step.measure(unit, sums)

    yield from ((unit, partial(measure, unit, found)) for unit, found in ranks.deal(units, prepare))


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
