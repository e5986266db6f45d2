"""Captured programs on disk, so that a model that was compiled once is not captured again.

An entry is one sealed file of data (`semkv.artifact.state_file`): graphs as JSON, the constants that they hold, and the names of
the model's own tensors, never the tensors. Its name is a digest of all that the capture depended on, so an entry is right or
not found; nothing is ever updated. The entries that were used last are kept, `KEPT` of them.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import semkv.artifact
import semkv.capture
import semkv.ir
import semkv.passes
from semkv.artifact.load import build_program, read_graphs
from semkv.artifact.manifest import ProgramFacts, current_versions
from semkv.artifact.save import program_facts, program_graphs
from semkv.artifact.state_file import load_tensors, save_tensors
from semkv.capture.checks import check_model
from semkv.capture.device import device_of
from semkv.capture.identity import model_identity
from semkv.compiler.pipeline import captured_program, identity
from semkv.errors import ArtifactError, CaptureError
from semkv.io.cache_folder import FOLDER, cache_folder
from semkv.io.files import validate
from semkv.ir.program import Program
from semkv.model.plain_tensors import named_plain_tensors, place
from semkv.passes.shapes import with_shapes

KIND = "captured program"
ENTRY = re.compile(r"[0-9a-f]{64}\.safetensors")

KEPT = 64
"""Entries that stay: megabytes each, one for each model and version of what captures it."""


def cached_program(model: nn.Module, fingerprint: str) -> Program:
    """`captured_program(model)`, from the cache where it is there, and left there where it was not.

    The program shares the model's tensors. A damaged entry is made anew, and a model without an identity is captured, each
    with a warning that says why.

    Parameters
    ----------
    fingerprint: `model_fingerprint(model)`.

    Raises
    ------
    CaptureError, InputError: as `captured_program`.
    """
    check_model(model)
    try:
        key = entry_key(model, fingerprint)
    except CaptureError as reason:
        warnings.warn(f"captured without the cache: {reason}", stacklevel=3)
        return captured_program(model)
    path = cache_folder() / f"{key}.safetensors"
    if path.exists():
        try:
            program = with_shapes(load_captured(path, key, model))
        except ArtifactError as reason:
            warnings.warn(f"captured again, as the cached program cannot be used: {reason}", stacklevel=3)
        else:
            with suppress(OSError):  # a folder that cannot be written serves what it has
                path.touch()
            return program
    program = captured_program(model)
    try:
        save_captured(program, path, key, model)
        evict(path.parent)
    except ArtifactError as reason:
        warnings.warn(f"the captured program was not cached: {reason}", stacklevel=3)
    return program


def evict(folder: Path, kept: int = KEPT) -> None:
    """Remove all entries but the `kept` that were used last; other files stay."""
    used: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        if ENTRY.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another process evicts as well
                used.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(used, reverse=True)[kept:]:
        path.unlink(missing_ok=True)


def entry_key(model: nn.Module, fingerprint: str) -> str:
    """Digest of the model, of the passes and their source, of versions, and of the default dtype, which a model's forward may read while
    it is captured; `CaptureError` for a model without an identity."""
    versions, default = current_versions().model_dump_json(), str(torch.get_default_dtype())
    parts = (fingerprint, model_identity(model), versions, identity(), _source_digest(), default)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _source_digest() -> str:
    """Of the files that make a captured program and its JSON: an edited pass must not find what it made before."""
    digest = hashlib.sha256()
    for package in (semkv.ir, semkv.capture, semkv.passes, semkv.artifact):
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(f"\n{package.__name__}/{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def save_captured(program: Program, path: Path, key: str, model: nn.Module) -> None:
    """Write an entry. `ArtifactError`: the program holds what JSON cannot, or the folder cannot be written."""
    graphs, tensors = program_graphs(program)
    named = _tensors_of(model)
    own = {place(tensor): name for name, tensor in reversed(named.items())}
    storages = {tensor.untyped_storage().data_ptr() for tensor in named.values() if isinstance(tensor, nn.Parameter)}
    constants = {key: tensor for key, tensor in tensors.items() if place(tensor) not in own}
    for name, tensor in constants.items():
        if isinstance(tensor, nn.Parameter) or tensor.untyped_storage().data_ptr() in storages:
            raise ArtifactError(f"tensor {name!r} is made of the model's parameters, which a copy would not follow")
    meta: dict[str, Any] = {
        "program": program_facts(program, list(graphs)),
        "graphs": graphs,
        "model": {key: own[place(tensor)] for key, tensor in tensors.items() if place(tensor) in own},
    }
    try:
        save_tensors(path, KIND, meta, constants, fingerprint=key)
    except OSError as cause:
        raise ArtifactError(f"{path}: cannot be written ({cause}); set {FOLDER} to a folder that can") from cause


def load_captured(path: Path, key: str, model: nn.Module) -> Program:
    """The program of an entry on the tensors of `model`; `ArtifactError` where it is damaged, altered or foreign."""
    device = device_of(model)
    meta, constants = load_tensors(path, KIND, key, device=device)
    names, graphs = meta.get("model"), meta.get("graphs")
    if not isinstance(names, dict) or not isinstance(graphs, dict):
        raise ArtifactError(f"{path}: no graphs and names of tensors; delete it")
    own = _tensors_of(model)
    if unknown := [name for name in names.values() if name not in own]:
        raise ArtifactError(f"{path}: the model has no tensor {unknown[0]!r}; delete it")
    # A private map of the file would be lost with it, and constants are small.
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in constants.items()}
    tensors |= {key: own[name] for key, name in names.items()}
    facts = validate(ProgramFacts, meta.get("program"), path, error=ArtifactError)
    if set(graphs) != set(facts.graphs):
        raise ArtifactError(f"{path}: graphs {sorted(graphs)}, expected {sorted(facts.graphs)}; delete it")
    modules = read_graphs(facts, lambda name: (graphs[name], f"{path}: {name}"), tensors, device)
    program = build_program(facts, modules, path)
    if program.stage != "found" or program.head is None:
        raise ArtifactError(f"{path}: a program at stage {program.stage!r}, expected one that was found; delete it")
    return program


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that wrap others as what they hold."""
    return dict(named_plain_tensors(model))


__all__ = ["cached_program", "entry_key", "evict", "load_captured", "save_captured"]
