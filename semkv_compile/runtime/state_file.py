"""States as files: what `State.save` writes and `CompiledModel.load_state` reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from semkv.artifact.fingerprint import program_fingerprint, weights_digest
from semkv.artifact.state_file import load_tensors, save_tensors
from semkv.errors import ArtifactError
from semkv.runtime.components import Components
from semkv.runtime.modes import undisturbed
from semkv.runtime.placement import Placement
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.snapshot import row_from_tensors, row_to_tensors


@undisturbed
def write_state(
    path: str | os.PathLike[str],
    placement: Placement,
    rows: Sequence[RowMemory],
    logits: Tensor,
    pending: Tensor | None,
) -> None:
    """Write a state as one file: every tier of every row, logits [B, vocab], unread tokens int64 [B, 1]. `StateError` where its model has
    other weights by now."""
    if placement.weights is not None:
        placement.weights.check("this state")
    meta: dict[str, Any] = {"rows": [], "compiled": _identity(placement)}
    tensors: dict[str, Tensor] = {"logits": logits}
    if pending is not None:
        tensors["pending"] = pending
    for index, row in enumerate(rows):
        facts, own = row_to_tensors(row)
        meta["rows"].append(facts)
        tensors |= {f"{index}.{name}": tensor for name, tensor in own.items()}
    save_tensors(path, "state", meta, tensors, fingerprint=program_fingerprint(placement.program))


@undisturbed
def read_state(path: str | os.PathLike[str], placement: Placement) -> tuple[list[RowMemory], Tensor, Tensor | None]:
    """(rows, logits, unread tokens) of a state that this model, or one compiled alike, saved; `ArtifactError` for any other."""
    program = placement.program
    meta, tensors = load_tensors(path, "state", program_fingerprint(program))
    _check_identity(path, meta.get("compiled"), _identity(placement))
    facts = meta.get("rows")
    logits = tensors.get("logits")
    if not isinstance(facts, list) or logits is None or logits.shape != (len(facts), program.vocab_size):
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
    pending = tensors.get("pending")
    if pending is not None:
        if pending.shape != (len(rows), 1) or pending.dtype != torch.int64:
            raise ArtifactError(
                f"{path}: unread tokens of shape {tuple(pending.shape)} for {len(rows)} rows; save the state again"
            )
        if pending.numel() and not 0 <= int(pending.min()) <= int(pending.max()) < program.vocab_size:
            raise ArtifactError(f"{path}: unread tokens outside of the vocabulary; save the state again")
        pending = pending.clone().to(placement.device)
    return rows, logits.clone().to(placement.device), pending


def _check_identity(path: str | os.PathLike[str], found: object, own: dict[str, Any]) -> None:
    """Raise `ArtifactError`, with what differs, where a state's facts are not `own`."""
    if found == own:
        return
    theirs = found if isinstance(found, dict) else {}
    same = ("plan", "calibrated")  # which follow from the others
    said = _differing(theirs, own, [name for name in {**own, **theirs} if name not in same])
    said = said or _differing_parts(theirs.get("plan"), own["plan"]) or ["another profile"]
    raise ArtifactError(
        f"{path}: a state of a model that was compiled otherwise: {'; '.join(said)}; compile with the same settings and profile"
    )


def _differing(theirs: Mapping[str, Any], own: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Of facts by name, those that differ, in words."""
    return [
        f"{name} {theirs.get(name)!r}, expected {own.get(name)!r}"
        for name in names
        if theirs.get(name) != own.get(name)
    ]


def _differing_parts(theirs: Any, own: list[list[Any]]) -> list[str]:
    """What differs in the first parts of plans that do."""
    whole = isinstance(theirs, list) and all(
        isinstance(part, list) and part and isinstance(part[-1], dict) for part in theirs
    )
    if not whole or [part[:-1] for part in theirs] != [part[:-1] for part in own]:
        return ["its layers or heads are composed otherwise"]
    return next((_differing(x[-1], y[-1], [*y[-1]]) for x, y in zip(theirs, own) if x != y), [])


def _identity(placement: Placement) -> dict[str, Any]:
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


def _composition(components: Components) -> dict[str, str]:
    """A part's components in words, by name: routers and choosers of forms by their class, as weights are no words."""
    own = {field.name: getattr(components, field.name) for field in fields(components)}  # not what is computed of them
    named = ("router", "forms")
    return {name: type(value).__name__ if name in named else repr(value) for name, value in own.items()}
