"""All calibration steps of one model, in order: each adds its section to a profile, and none is lost to an interruption."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv.artifact.fingerprint import model_fingerprint
from semkv.errors import ConfigError
from semkv.io.ranks import ALONE, Ranks
from semkv.ir.program import Program
from semkv.profiles.schema import Measured, Profile, ProfileInfo

from .calibrate import annotated_program, calibrate, model_facts, versions
from .data import CalibrationData
from .layer_errors import CompressionErrors
from .measure import Measure, Report, Subject, run_measure
from .measure_settings import MeasureSettings
from .memory import Memory
from .retrieval_head import Distillation
from .retrieval_heads import SemanticRetrieval
from .samples import MeasureData
from .sentences import Sentences
from .settings import CalibrationSettings
from .sketch import Sketch
from .taxonomy import Taxonomy

MEASURES: dict[str, type[Measure]] = {
    step.name: step
    for step in (Taxonomy, SemanticRetrieval, CompressionErrors, Sketch, Sentences, Distillation, Memory)
}
SEKV = "sekv"
STEPS: tuple[str, ...] = (*MEASURES, SEKV)
"""Every step in the order in which they run: layer errors and the sketch read the retrieval heads."""

RUN_FILE = "run.json"
HISTORY_FILE = "history.json"


@dataclass(frozen=True)
class Job:
    """A model and all that its steps read.

    data, settings: of SeKV's training, data None where it does not run. measure_data, measure_settings: of all other
    steps, data None where none of them runs. latents: calibrate for `CompileConfig(latents=True)`. program: the model's
    `annotated_program`, where it is known.
    """

    model: torch.nn.Module
    name: str
    command: str
    data: CalibrationData | None
    settings: CalibrationSettings
    measure_data: MeasureData | None
    measure_settings: MeasureSettings
    latents: bool = False
    program: Program | None = None


def program_of(job: Job) -> Program:
    """The job's program, captured where it is not known."""
    return job.program or annotated_program(job.model, latents=job.latents)


@dataclass(frozen=True)
class Finished:
    """The profile, the held-out figures of the `sekv` step (empty where it did not run), and a note for each step.

    skipped: steps that could not measure this model; their notes say why.
    """

    profile: Profile
    history: list[dict[str, float]]
    notes: dict[str, str]
    skipped: tuple[str, ...] = ()


@dataclass
class _Run:
    """What is known of an unfinished run; kept in `run.json` of the work folder."""

    identity: str
    notes: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def check_steps(steps: Sequence[str]) -> tuple[str, ...]:
    """The steps in the order in which they run, each once; `ConfigError` names an unknown one."""
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        raise ConfigError(f"--steps {unknown[0]!r} is unknown: it can be {', '.join(STEPS)}")
    return tuple(step for step in STEPS if step in steps)


def run_steps(
    job: Job,
    steps: Sequence[str],
    *,
    profile: Profile | None = None,
    work: Path | None = None,
    report: Report | None = None,
    begin: Callable[[str], None] | None = None,
    save_seconds: float | None = None,
    ranks: Ranks = ALONE,
) -> Finished:
    """Run `steps` for one model.

    Parameters
    ----------
    profile: whose other sections are kept; it has to be the model's. work: folder of an unfinished run, which goes on
        where it stopped; it stays when the run ends. report: called with a phase, what is done, what there is to do, and
        figures. begin: called with the name of each step before it runs. save_seconds: least time between checkpoints of
        a step. ranks: processes that share the work, each with the whole job; the first reads and writes `work`, and all
        return the same sections.

    Raises
    ------
    ConfigError: a step is unknown, the data does not fit the model, or `work` is of another run.
    ProfileError: `profile` belongs to another model. CaptureError: the model cannot be captured.
    """
    steps = check_steps(steps)
    program = program_of(job)
    fingerprint = model_fingerprint(job.model)
    if profile is not None:
        profile.check_model(fingerprint)
        profile.check_stores(program.stores)
    identity = _identity(job, steps, fingerprint)
    empty = Profile(ProfileInfo(fingerprint=fingerprint, model=model_facts(program, job.name)))
    ranks.same(identity, "model, data or settings")
    state, saved, history = ranks.from_first(lambda: _read_work(work, identity))
    current = saved or profile or empty
    writes = work is not None and ranks.first
    measured = job.measure_settings
    if any(step in MEASURES for step in steps):
        _check_measurable(program, job)
        job.measure_data.check(program.vocab_size, program.max_positions, measured.length, measured.steps)
    if writes:
        _write_json(work / RUN_FILE, vars(state))
    for step in steps:
        if step in state.notes:
            continue
        if begin is not None:
            begin(step)
        path = None if work is None else work / f"{step}.safetensors"
        if step == SEKV:
            current, state.notes[step], history = _train(job, program, current, path, report, ranks)
            if writes:
                _write_json(work / HISTORY_FILE, history)
        else:
            made = _measure(step, job, program, current, path, identity, report, save_seconds, ranks)
            current, state.notes[step], skipped = made
            state.skipped += [step] if skipped else []
        if writes:
            current.save(work / "profile")
            _write_json(work / RUN_FILE, vars(state))
    return Finished(current, history, state.notes, tuple(state.skipped))


def forget(work: Path) -> None:
    """Remove the folder of an unfinished run."""
    shutil.rmtree(work, ignore_errors=True)


def with_section(
    profile: Profile, name: str, section: Any, prefix: str, tensors: dict[str, Tensor], **others: Any
) -> Profile:
    """A copy of a profile with one section and its tensors replaced; all others are as they were."""
    content = {key: getattr(profile.info, key) for key in ProfileInfo.model_fields} | {name: section} | others
    content |= {"tensors": {}, "tensors_digest": None}
    kept = {key: value for key, value in profile.tensors.items() if not prefix or not key.startswith(prefix)}
    return Profile(ProfileInfo(**content), kept | tensors)


def _measure(
    step: str,
    job: Job,
    program: Program,
    profile: Profile,
    path: Path | None,
    identity: str,
    report: Report | None,
    save_seconds: float | None,
    ranks: Ranks,
) -> tuple[Profile, str, bool]:
    """The profile with a measured section, a note, and whether the step could not measure this model."""
    started = time.monotonic()
    measure = MEASURES[step](Subject(program, job.measure_data, job.measure_settings, profile))
    options = {} if save_seconds is None else {"save_seconds": save_seconds}
    own = hashlib.sha256(f"{identity} {step}".encode()).hexdigest()
    outcome = run_measure(measure, identity=own, path=path, report=report or (lambda *_: None), ranks=ranks, **options)
    if outcome.section is None:
        return profile, outcome.note, True
    record = Measured(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=job.command,
        data=job.measure_data.description,
        data_digest=job.measure_data.digest(),
        units=max(1, outcome.units),
        wall_minutes=round((time.monotonic() - started) / 60, 3),
        versions=versions(),
        settings=job.measure_settings.model_dump(mode="json"),
        note=outcome.note,
    )
    records = dict(profile.info.measured) | {step: record}
    made = with_section(profile, measure.field, outcome.section, measure.prefix, outcome.tensors, measured=records)
    return made, outcome.note, False


def _train(
    job: Job, program: Program, profile: Profile, path: Path | None, report: Report | None, ranks: Ranks
) -> tuple[Profile, str, list[dict[str, float]]]:
    """The profile with SeKV's trained parts, a note, and the held-out figures over the steps."""
    made = calibrate(
        job.model,
        job.data,
        job.settings,
        name=job.name,
        command=job.command,
        work=None if path is None else path.with_suffix(""),
        progress=report,
        program=program,
        ranks=ranks,
    )
    info, tensors = made.profile.info, made.profile.tensors
    merged = with_section(profile, "sekv", info.sekv, "sekv.", tensors, provenance=info.provenance)
    found = info.provenance.losses
    note = (
        f"catches {found['caught']:.0%} of held-out attention to far spans; the mean key's direction, without training, "
        f"{found['coarse']:.0%}; the best choice {found['oracle']:.0%}"
    )
    return merged, note, made.history


def _check_measurable(program: Program, job: Job) -> None:
    if not any(site.treatment == "method" for site in program.sites):
        raise ConfigError(
            "every attention of this model has a sliding window: there is no memory to compress, nothing to calibrate"
        )


def _identity(job: Job, steps: Sequence[str], fingerprint: str) -> str:
    """A hash of all that decides the result."""
    parts = [fingerprint, ",".join(steps), *["latents"] * job.latents]
    if SEKV in steps:
        parts += [job.data.digest(), job.settings.identity()]
    if any(step in MEASURES for step in steps):
        parts += [job.measure_data.digest(), job.measure_settings.identity()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _read_run(work: Path | None, identity: str) -> _Run | None:
    """The unfinished run in `work`, None where there is none; `ConfigError` where it is damaged or another one."""
    if work is None or not work.is_dir() or not any(work.iterdir()):
        return None
    path = work / RUN_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        run = _Run(str(content["identity"]), dict(content["notes"]), list(content["skipped"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the unfinished run in {work} is damaged ({error}): start again with --restart") from None
    if run.identity != identity:
        raise ConfigError(
            f"the unfinished run in {work} was made with other steps, settings, data or another model: "
            "repeat the first command, or start again with --restart"
        )
    return run


def _read_work(work: Path | None, identity: str) -> tuple[_Run, Profile | None, list[dict[str, float]]]:
    """What an unfinished run has made, nothing of a new one."""
    state = _read_run(work, identity) or _Run(identity)
    saved = Profile.load(work / "profile") if work is not None and (work / "profile").is_dir() else None
    return state, saved, _read_history(work)


def _read_history(work: Path | None) -> list[dict[str, float]]:
    path = None if work is None else work / HISTORY_FILE
    return json.loads(path.read_text()) if path is not None and path.is_file() else []


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)
