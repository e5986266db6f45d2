"""Steps that can be watched."""

from __future__ import annotations

from dataclasses import replace

from semkv.compiled import CompiledModel


def eagerly(compiled: CompiledModel) -> CompiledModel:
    """`compiled`, whose steps ask the memory for entries, as steps of several tokens do: what they look at can be seen."""
    object.__setattr__(compiled, "placement", replace(compiled.placement, steps=None))
    return compiled
