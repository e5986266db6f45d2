"""Interrupted calibrations: one safetensors file, written whole or not at all, that resumes to the same result."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from semkv.errors import ConfigError


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and a JSON state with the number of steps done."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file at `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    safetensors.torch.save_file(tensors, partial, metadata={"state": json.dumps(checkpoint.state, allow_nan=False)})
    os.replace(partial, path)


def read(path: Path, identity: str) -> Checkpoint | None:
    """The checkpoint at `path`, None where there is none; `ConfigError` where it is damaged or of another run."""
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        stated = state["identity"]
    except Exception as error:
        raise ConfigError(f"the checkpoint {path} is damaged ({error}): start again with --restart") from None
    if stated != identity:
        raise ConfigError(
            f"the checkpoint {path} was made with other settings, data or another model: "
            "repeat the first command, or start again with --restart"
        )
    return Checkpoint(tensors, state)
