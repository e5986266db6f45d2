"""Writing an artifact: graphs as JSON, weights as safetensors, a manifest that seals both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from semkv.artifact.arguments import DTYPE_NAME
from semkv.artifact.fingerprint import program_fingerprint
from semkv.artifact.graph_json import graph_tensors, graph_to_json
from semkv.artifact.manifest import (
    ARTIFACT_SCHEMA,
    FORMAT,
    GRAPHS,
    MANIFEST,
    PROFILE,
    SEAL,
    WEIGHTS,
    Manifest,
    current_versions,
    graph_file,
    is_artifact,
    site_values,
    write_manifest,
)
from semkv.artifact.recurrences import bodies_of, body_graphs, body_values, site_facts
from semkv.artifact.weights import pack
from semkv.config import CompileConfig, check_budget
from semkv.errors import ArtifactError
from semkv.io.files import dump_json, member, replace_folder, sha256_of, validate
from semkv.io.tensor_file import write_tensors
from semkv.ir.program import Program


class SavesToFolder(Protocol):
    """Anything with `save(path)`, a profile for one."""

    def save(self, path: Path) -> Any:
        """Write itself as folder `path`."""


def save_program(
    program: Program,
    path: str | os.PathLike[str],
    *,
    method: str,
    method_options: Mapping[str, Any] | None = None,
    budget: float | int | None = None,
    config: CompileConfig | None = None,
    profile: SavesToFolder | str | os.PathLike[str] | None = None,
    model_fingerprint: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a program and how it was compiled as a folder, and return its path.

    The folder appears complete or not at all. An artifact that was there is replaced; any other folder is refused.

    Parameters
    ----------
    profile: an object with `save(path)`, or a profile's folder to copy.
    model_fingerprint: of the model before compilation (`semkv.artifact.fingerprint.model_fingerprint`).
    model_config, generation_config: `to_dict()` of the Hugging Face objects, where there are any.
    extra: any further JSON that the caller wants back in `manifest.extra`.

    Raises
    ------
    ArtifactError: the path is taken by something else, or the program holds what an artifact cannot.
    BudgetError: the budget is not a valid one.
    """
    path = Path(path).absolute()
    _check_target(path)
    graphs, tensors = program_graphs(program)
    stored, views = pack(tensors)
    value = {
        "format": FORMAT,
        "schema": ARTIFACT_SCHEMA,
        "versions": current_versions(),
        "program": program_facts(program, list(graphs)),
        "program_fingerprint": program_fingerprint(program),
        "tensors": views,
        "compile": {
            "method": method,
            "method_options": dict(method_options or {}),
            "budget": check_budget(budget),
            "config": config or CompileConfig(),
        },
        "model": {
            "fingerprint": model_fingerprint,
            "config": None if model_config is None else dict(model_config),
            "generation_config": None if generation_config is None else dict(generation_config),
        },
        "profile": None if profile is None else PROFILE,
        "extra": dict(extra or {}),
    }
    try:
        with replace_folder(path) as folder:
            _write_files(folder, graphs, stored, profile)
            value["files"] = _file_entries(folder)
            remedy = "pass what the docstring of save_program says"
            write_manifest(folder, validate(Manifest, value, path, error=ArtifactError, remedy=remedy))
    except OSError as cause:
        raise ArtifactError(f"{path}: cannot be written ({cause}); choose another path or make room") from cause
    return path


def _check_target(path: Path) -> None:
    """Refuse to replace anything but an artifact."""
    if not path.exists() and not path.is_symlink():
        return
    if path.is_dir() and not path.is_symlink():
        if not any(path.iterdir()):
            return
        known = {MANIFEST, SEAL, WEIGHTS, PROFILE, "programs"}
        unknown = sorted(item.name for item in path.iterdir() if item.name not in known)
        if is_artifact(path) and not unknown:
            return
        found = f"holds {', '.join(unknown[:3])}" if unknown else "holds no manifest of an artifact"
        raise ArtifactError(f"{path}: a folder that {found} is not overwritten; choose another path or remove it first")
    raise ArtifactError(f"{path}: exists and is not a folder; choose another path or remove it first")


def program_graphs(program: Program) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """The program's graphs as JSON, and all their tensors under keys that are unique over the graphs."""
    tensors: dict[str, Tensor] = {}
    graphs = {}
    bodies = bodies_of(program)
    modules = {name: getattr(program, name) for name in GRAPHS} | body_graphs(bodies)
    for name, module in modules.items():
        if module is None:
            continue
        keys = {}
        for target, tensor in graph_tensors(module).items():
            key = target
            while key in tensors and tensors[key] is not tensor:
                key = f"{key}@{name}"
            tensors[key] = tensor
            keys[target] = key
        try:
            graphs[name] = graph_to_json(module, keys, bodies=bodies)
        except ArtifactError as cause:
            raise ArtifactError(f"program {name}: {cause}") from cause
    return graphs, tensors


def _graph_bytes(value: dict[str, Any], name: str) -> bytes:
    """A graph's JSON with a line per node."""
    rest = {key: item for key, item in value.items() if key != "nodes"}
    lines = [dump_json(node, name, error=ArtifactError, indent=None).strip() for node in value["nodes"]]
    head = dump_json(rest, name, error=ArtifactError).rstrip()[:-1].rstrip()
    return head + b',\n "nodes": [\n  ' + b",\n  ".join(lines) + b"\n ]\n}\n"


def program_facts(program: Program, graphs: list[str]) -> dict[str, Any]:
    """The fields of `semkv.artifact.manifest.ProgramFacts` as JSON values."""
    return {
        "stage": program.stage,
        "graphs": graphs,
        "sites": site_values(program.sites),
        "vocab_size": program.vocab_size,
        "max_positions": program.max_positions,
        "dtype": DTYPE_NAME[program.dtype],
        "batched": program.batched,
        "recurrences": site_facts(program.recurrences),
        "bodies": body_values(bodies_of(program)),
        "evaluated": list(program.evaluated),
        "seams": asdict(program.seams),
        "notes": list(program.notes),
    }


def _write_files(
    folder: Path,
    graphs: Mapping[str, dict[str, Any]],
    stored: Mapping[str, Tensor],
    profile: SavesToFolder | str | os.PathLike[str] | None,
) -> None:
    """Everything in an artifact but the manifest."""
    (folder / "programs").mkdir()
    for name, value in graphs.items():
        (folder / graph_file(name)).write_bytes(_graph_bytes(value, graph_file(name)))
    write_tensors(folder / WEIGHTS, stored, error=ArtifactError)
    if isinstance(profile, (str, os.PathLike)):
        shutil.copytree(profile, folder / PROFILE)
    elif profile is not None:
        profile.save(folder / PROFILE)


def _file_entries(folder: Path) -> dict[str, dict[str, Any]]:
    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            member(folder, name, error=ArtifactError)
            entries[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path, error=ArtifactError)}
    return entries
