"""From a model and text to a profile."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from semkv.artifact.fingerprint import model_fingerprint
from semkv.compiler.pipeline import captured_program, on_latents
from semkv.errors import ConfigError
from semkv.io.ranks import ALONE, Ranks
from semkv.ir.program import Program
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.profiles.schema import ModelFacts, Profile, ProfileInfo, Provenance, SekvSection, SiteFacts

from .data import CalibrationData
from .parameters import routing_rows
from .settings import CalibrationSettings
from .train import Progress, Trainer


@dataclass(frozen=True)
class Calibration:
    """A finished calibration: the profile, and the held-out figures at every evaluation (with the key `step`)."""

    profile: Profile
    history: list[dict[str, float]]


def calibrate(
    model: torch.nn.Module,
    data: CalibrationData,
    settings: CalibrationSettings,
    *,
    name: str,
    command: str = "",
    work: Path | None = None,
    progress: Progress | None = None,
    program: Program | None = None,
    ranks: Ranks = ALONE,
) -> Calibration:
    """Train SeKV's router, thresholds and rank gates for `model`.

    Parameters
    ----------
    model: a decoder in evaluation mode; it is not changed.
    name: of the model, for people. command: kept in the provenance.
    work: folder that an interrupted run goes on from; it stays when the run ends.
    progress: see `semkv.profiles.calibration.train.Progress`.
    program: the model's `annotated_program`, where it is known.
    ranks: processes that share the work; all end with the same tensors.

    Raises
    ------
    ConfigError: the model is in training mode, the data does not fit it, or `work` is of another run.
    CaptureError: the model cannot be captured.
    """
    program = program or annotated_program(model)
    check(program, data, settings)
    fingerprint = model_fingerprint(model)
    digest = data.digest()
    identity = hashlib.sha256(f"{fingerprint} {digest} {settings.identity()}".encode()).hexdigest()
    result = Trainer(program, data, settings, identity=identity, work=work, progress=progress, ranks=ranks).run()
    provenance = Provenance(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        data=data.description,
        data_digest=digest,
        tokens=data.tokens,
        seed=settings.seed,
        steps=result.steps,
        stopped_early=result.stopped_early,
        wall_minutes=round(result.minutes, 3),
        versions=versions(),
        settings=settings.model_dump(mode="json"),
        losses={key: round(value, 6) for key, value in result.figures.items()},
        table=tuple({key: round(value, 4) for key, value in row.items()} for row in result.table),
    )
    profile = to_profile(program, result.tensors, settings, name=name, fingerprint=fingerprint, provenance=provenance)
    return Calibration(profile, result.history)


def annotated_program(model: torch.nn.Module, *, latents: bool = False) -> Program:
    """The captured program of a model in evaluation mode, its sites annotated as for a method that compresses.

    latents: with attention on latents (`CompileConfig.latents`).

    Raises
    ------
    ConfigError: the model is in training mode, or has no latents. CaptureError: it cannot be captured.
    """
    if model.training:
        raise ConfigError(
            "the model is in training mode, so dropout would change what it attends to: call model.eval() first"
        )
    program = captured_program(model)
    return AssignBudgets().run(on_latents(program) if latents else program, PassOptions(method="sekv"))


def check(program: Program, data: CalibrationData, settings: CalibrationSettings) -> None:
    """Raise `ConfigError` when calibration could not work, before it starts."""
    if not any(site.treatment == "method" for site in program.sites):
        raise ConfigError(
            "every attention of this model has a sliding window: there is no memory to compress, nothing to calibrate"
        )
    needed = settings.length + settings.queries
    if program.max_positions is not None and needed > program.max_positions:
        raise ConfigError(
            f"length {settings.length} with {settings.queries} queries needs {needed} positions, the model has "
            f"{program.max_positions}: pass a smaller --length"
        )
    largest = max(int(ids.max()) for ids in data.sequences)
    if largest >= program.vocab_size:
        raise ConfigError(
            f"the data holds token id {largest}, the model's vocabulary has {program.vocab_size} entries: "
            "use the model's own tokenizer"
        )


def model_facts(program: Program, name: str) -> ModelFacts:
    """What a profile says about its model."""
    sites = tuple(
        SiteFacts(
            index=site.index,
            name=site.name,
            store=site.store,
            q_heads=site.q_heads,
            kv_heads=site.kv_heads,
            key_dim=site.key_dim,
            value_dim=site.value_dim,
            treatment=site.treatment,
        )
        for site in program.sites
    )
    return ModelFacts(
        name=name,
        dtype=str(program.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        vocab_size=program.vocab_size,
        max_positions=program.max_positions,
        sites=sites,
    )


def to_profile(
    program: Program,
    tensors: dict[str, Tensor],
    settings: CalibrationSettings,
    *,
    name: str,
    fingerprint: str,
    provenance: Provenance | None = None,
) -> Profile:
    """The profile that holds a training's `tensors`, in half precision where many heads have them."""
    dims = tuple(routing_rows(s, settings) if s.treatment == "method" else 0 for s in program.sites)
    section = SekvSection(
        routing_dims=dims,
        max_rank=settings.max_rank,
        gate_hidden=settings.gate_hidden,
        gate_summary_dim=max(dims),
        gate_floor=settings.gate_floor,
        router_init=settings.router_init,
    )
    stored = {
        f"sekv.{key}": value.half() if key.startswith("router.") else value.float() for key, value in tensors.items()
    }
    info = ProfileInfo(fingerprint=fingerprint, model=model_facts(program, name), sekv=section, provenance=provenance)
    return Profile(info, stored)


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    names = ("semkv", "torch", "transformers", "safetensors", "networkx", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
