"""semkv: compile any PyTorch decoder into one whose attention reads a mixed-resolution KV memory.

    compiled = semkv.compile(model, profile, budget=0.10)
    compiled.generate(input_ids, max_new_tokens=256)

The public names load on first use, so that `import semkv` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semkv import bundled
    from semkv.api import compile, explain, load
    from semkv.compiled import CompiledModel
    from semkv.config import CompileConfig
    from semkv.profiles.schema import Profile
    from semkv.runtime.state import State

__version__ = "0.1.0"

_HOMES = {
    "CompileConfig": "semkv.config",
    "CompiledModel": "semkv.compiled",
    "Profile": "semkv.profiles.schema",
    "State": "semkv.runtime.state",
    "compile": "semkv.api",
    "explain": "semkv.api",
    "load": "semkv.api",
}

__all__ = ["CompileConfig", "CompiledModel", "Profile", "State", "bundled", "compile", "explain", "load"]


def __getattr__(name: str) -> Any:
    if name == "bundled":
        return importlib.import_module("semkv.bundled")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'semkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
