"""Compiled models and states as files: what `CompiledModel.save`, `semkv.load`, `State.save` and `load_state` do."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from semkv.artifact.fingerprint import program_fingerprint, weights_digest
from semkv.artifact.load import load_program
from semkv.artifact.save import save_program
from semkv.artifact.state_file import load_tensors, save_tensors
from semkv.capture.device import usable
from semkv.compiled import CompiledModel, pass_options
from semkv.errors import ArtifactError, SemkvError
from semkv.ir.ranks import Ranks
from semkv.kernels.tuning import Tuning
from semkv.methods import find_method
from semkv.pipeline import lowered_among_ranks
from semkv.profiles.schema import Profile
from semkv.runtime.budget import Budget
from semkv.runtime.components import Components
from semkv.runtime.modes import undisturbed
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.snapshot import row_from_tensors, row_to_tensors
from semkv.runtime.state import State

KERNELS = "kernels"
"""Under which a manifest's `extra` keeps tuned layouts."""
NUMBER, NUMBERS = "number", ("inf", "-inf", "nan")
"""The one key of a number that JSON has not, and what there is."""


@undisturbed
def save_compiled(compiled: CompiledModel, path: str | os.PathLike[str]) -> None:
    """Write the artifact folder of `compiled`; see docs/artifact.md. `ProfileError`: its profile is of weights that the model had."""
    if compiled.profile is not None and compiled.fingerprint is not None:
        compiled.profile.check_model(compiled.fingerprint)  # who loads it checks it as well
    config = compiled.config
    save_program(
        compiled.program,
        path,
        method=compiled.method.name,
        method_options=compiled.settings.method_options,
        budget=compiled.budget,
        config=compiled.settings,
        profile=compiled.profile,
        model_fingerprint=compiled.fingerprint,
        model_config=None if config is None else _plain(config.to_dict()),
        generation_config=_plain(compiled.generation_config.to_dict()),
        extra=None if compiled.tuning is None else {KERNELS: compiled.tuning.to_json()},
    )


@undisturbed
def load_compiled(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu", ranks: Ranks | None = None
) -> CompiledModel:
    """The compiled model of an artifact folder, or what one of `ranks` has of it; `ArtifactError`: damaged, altered or foreign."""
    program, manifest = load_program(path, device if ranks is None else "cpu")
    if program.stage != "lowered" or program.head is None:
        raise ArtifactError(f"{path}: holds a program at stage {program.stage!r}, expected a compiled model")
    profile = None if manifest.profile_path is None else Profile.load(manifest.profile_path)
    if profile is not None and manifest.model.fingerprint is not None:
        profile.check_model(manifest.model.fingerprint)
    facts, model = manifest.compile, manifest.model
    try:
        method = find_method(facts.method, facts.method_options)
        config = None if model.config is None else PreTrainedConfig.from_dict(_restored(model.config))
        generation = None if model.generation_config is None else GenerationConfig.from_dict(model.generation_config)
        layouts = manifest.extra.get(KERNELS)
        settings = facts.config
        if ranks is not None:
            dtype = settings.torch_kv_dtype(program.dtype)
            decided = method.for_budget(program, profile, Budget(facts.budget, dtype, page_size=settings.page_size))
            program = lowered_among_ranks(program, ranks, pass_options(program, decided, profile), usable(device))
        if settings.cuda_graphs and torch.device(device).type != "cuda":
            warnings.warn(f"{path} was saved with cuda_graphs=True; on {device} it runs without", stacklevel=3)
            settings = settings.model_copy(update={"cuda_graphs": False})
        return CompiledModel(
            program,
            profile,
            method,
            facts.budget,
            settings,
            fingerprint=model.fingerprint,
            model_config=config,
            generation_config=generation,
            lowered=True,
            tuning=None if layouts is None else Tuning.from_json(layouts, f"{path}: extra.{KERNELS}"),
        )
    except SemkvError:
        raise
    except Exception as error:
        raise ArtifactError(
            f"{path}: its settings do not describe a compiled model ({error}); save it again"
        ) from error


@undisturbed
def save_state(state: State, path: str | os.PathLike[str]) -> None:
    """Write a state as one file: every tier of every row. `StateError` where its model has other weights by now."""
    if state.placement.weights is not None:
        state.placement.weights.check("this state")
    meta: dict[str, Any] = {"rows": [], "compiled": _identity(state)}
    tensors: dict[str, Tensor] = {"logits": state.logits}
    if state.pending is not None:
        tensors["pending"] = state.pending
    for index, row in enumerate(state.rows):
        facts, own = row_to_tensors(row)
        meta["rows"].append(facts)
        tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
    save_tensors(path, "state", meta, tensors, fingerprint=program_fingerprint(state.placement.program))


@undisturbed
def load_state(compiled: CompiledModel, path: str | os.PathLike[str]) -> State:
    """A state that `compiled`, or a compiled model equal to it, saved; `ArtifactError` for any other."""
    placement = compiled.placement
    meta, tensors = load_tensors(path, "state", program_fingerprint(compiled.program))
    blank = State(placement, [], torch.zeros(0, dtype=torch.float32, device="cpu"))
    if meta.get("compiled") != _identity(blank):
        raise ArtifactError(
            f"{path}: a state of {meta.get('compiled')}, expected one of {_identity(blank)}; compile with the same settings and profile"
        )
    facts = meta.get("rows")
    logits = tensors.get("logits")
    if not isinstance(facts, list) or logits is None or logits.shape != (len(facts), compiled.program.vocab_size):
        raise ArtifactError(f"{path}: its rows and logits do not agree; save the state again")
    rows: list[RowMemory] = []
    for index, row in enumerate(facts):
        own = {name.split(".", 1)[1]: x for name, x in tensors.items() if name.startswith(f"{index}.")}
        try:
            rows.append(row_from_tensors(placement, row, own))
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ArtifactError(
                f"{path}: row {index} is not a memory of this model ({error}); save the state again"
            ) from error
    state = State(placement, rows, logits.clone().to(placement.device))
    pending = tensors.get("pending")
    if pending is not None:
        if pending.shape != (len(rows), 1) or pending.dtype != torch.int64:
            raise ArtifactError(
                f"{path}: unread tokens of shape {tuple(pending.shape)} for {len(rows)} rows; save the state again"
            )
        if pending.numel() and not 0 <= int(pending.min()) <= int(pending.max()) < compiled.program.vocab_size:
            raise ArtifactError(f"{path}: unread tokens outside of the vocabulary; save the state again")
        state.pending = pending.clone().to(placement.device)
    return state


def _identity(state: State) -> dict[str, Any]:
    placement = state.placement
    told: dict[str, Any] = {"floor": placement.budget.floor} if placement.budget.floor else {}
    told |= {"generated": placement.plan.generated} if placement.plan.keeps_generated else {}
    return told | {
        "method": placement.method,
        "plan": [
            [store, part.first, part.last, part.share, _composition(part.components)]
            for store, parts in sorted(placement.plan.parts.items())
            for part in parts
        ],
        "budget": placement.budget.value,
        "kv_dtype": str(placement.budget.dtype),
        "page_size": placement.page_size,
        "calibrated": weights_digest(dict(_tensors(placement.plan, "")))[:16],
    }


def _tensors(part: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """What a plan's components were calibrated to, by name: the tensors that they were made with, not what they compute later.

    Modules, as a retrieval head, are graphs of the program, whose fingerprint tells them.
    """
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from _tensors(value, f"{name}.{key}")
    elif isinstance(part, (list, tuple)):
        for index, value in enumerate(part):
            yield from _tensors(value, f"{name}.{index}")
    elif is_dataclass(part):
        for each in fields(part):
            if each.init:
                yield from _tensors(getattr(part, each.name), f"{name}.{each.name}")


def _composition(components: Components) -> str:
    """A part's components in words: routers and choosers of forms by their class, as weights are no words."""
    named = ("router", "forms")
    own = {field.name: getattr(components, field.name) for field in fields(components)}  # not what is computed of them
    plain = {name: value for name, value in own.items() if name not in named}
    return repr(plain | {name: type(getattr(components, name)).__name__ for name in named})


def _plain(value: Any) -> Any:
    """What JSON can hold of a value; the rest in words, and infinite numbers under a name."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: str(value)}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _restored(value: Any) -> Any:
    """The value that `_plain` wrote."""
    if isinstance(value, dict):
        if value.keys() == {NUMBER} and value[NUMBER] in NUMBERS:
            return float(value[NUMBER])
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
