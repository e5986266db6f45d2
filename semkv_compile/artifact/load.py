"""Reading an artifact: hashes first, then data, then graphs. No pickle, no modelling code, no code from the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from semkv.artifact.arguments import DTYPES
from semkv.artifact.graph_json import graph_from_json
from semkv.artifact.manifest import (
    GRAPHS,
    MANIFEST,
    WEIGHTS,
    Manifest,
    ProgramFacts,
    graph_file,
    parse_sites,
    read_manifest,
)
from semkv.artifact.recurrences import bodies_from, is_body_graph, sites_from
from semkv.artifact.weights import check_views, unpack
from semkv.errors import ArtifactError, ConfigError, SpecError
from semkv.io.files import read_json
from semkv.io.tensor_file import read_header, read_tensors
from semkv.ir import spec
from semkv.ir.graph import placeholders
from semkv.ir.program import Program
from semkv.ir.recurrence import Pieces


def load_program(path: str | os.PathLike[str], device: str | torch.device | None = None) -> tuple[Program, Manifest]:
    """The program and manifest of an artifact, with its tensors on `device` (default: the CPU, mapped from the file).

    Raises
    ------
    ArtifactError: the folder is no artifact, of another version, damaged, or altered; the message names the file.
    ConfigError: there is no such device here.
    """
    folder = Path(path)
    device = _usable("cpu" if device is None else device)
    manifest = read_manifest(folder)
    header = read_header(folder / WEIGHTS, error=ArtifactError)
    check_views(manifest.tensors, header.tensors, str(folder / MANIFEST))
    stored = read_tensors(folder / WEIGHTS, header, error=ArtifactError, device=device)
    tensors = unpack(stored, manifest.tensors)
    graphs = read_graphs(manifest.program, lambda name: _read_graph(folder, name), tensors, device)
    return build_program(manifest.program, graphs, folder), manifest


def read_graphs(
    facts: ProgramFacts, read: Callable[[str], tuple[Any, str]], tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, GraphModule]:
    """The graphs that `facts` list, of their JSON and its source as `read` gives them by name: bodies of recurrent sites first, which the
    others name."""
    names = sorted(dict.fromkeys(facts.graphs), key=lambda name: not is_body_graph(name))
    graphs: dict[str, GraphModule] = {}
    bodies: list[Pieces] = []
    for name in names:
        value, source = read(name)
        if not is_body_graph(name) and facts.bodies and not bodies:
            bodies = bodies_from(facts.bodies, graphs, source)
        graphs[name] = graph_from_json(value, tensors, device=device, name=source, bodies=bodies)
    return graphs


def build_program(facts: ProgramFacts, graphs: Mapping[str, GraphModule], source: Path) -> Program:
    """The program of stored facts and graphs by name, after the check of its stage's spec; `source` is for messages."""
    if len(set(facts.graphs)) != len(facts.graphs) or "body" not in facts.graphs:
        raise ArtifactError(
            f"{source / MANIFEST}: graphs {facts.graphs}, expected body and others once each; save it again"
        )
    made: dict[str, Any] = {name: graphs.get(name) for name in GRAPHS}
    program = Program(
        stage=facts.stage,
        sites=parse_sites(facts.sites),
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        dtype=DTYPES[facts.dtype],
        batched=facts.batched,
        recurrences=sites_from(facts.recurrences),
        evaluated=tuple(facts.evaluated),
        seams=facts.seams,
        notes=tuple(facts.notes),
        **made,
    )
    _check_program(program, source)
    return program


def _usable(device: str | torch.device) -> torch.device:
    """`device` as torch names it, after one allocation on it."""
    try:
        return torch.empty(0, dtype=torch.float32, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as cause:
        raise ConfigError(
            f"device {str(device)!r} cannot be used here ({cause}); pass another, such as 'cpu'"
        ) from cause


def _read_graph(folder: Path, name: str) -> tuple[Any, str]:
    path = folder / graph_file(name)
    return read_json(path, error=ArtifactError), str(path)


def _check_program(program: Program, folder: Path) -> None:
    """The spec of the program's stage, which compilation checks too: inputs, legal nodes, one memory call per site."""
    try:
        if program.head is not None and len(placeholders(program.head.graph)) != 1:
            raise SpecError(f"head: inputs {tuple(placeholders(program.head.graph))}, expected one")
        spec.check(program)
    except (SpecError, AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as cause:
        raise ArtifactError(
            f"{folder / 'programs'}: {str(cause)[:1000]}; the files were edited, save them again"
        ) from cause
