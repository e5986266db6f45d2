"""States as inputs of an exported step, and the state whose form a step has by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.export.layout import Layout
from semkv.export.rows import Heads, rows_of
from semkv.export.write import example_state
from tests.export.steps import reserved


def of(full: CompiledModel, method: str, budget: float, **options: Any) -> CompiledModel:
    return full.with_method(method, budget, config=CompileConfig(floor=0), **options)


def layout(compiled: CompiledModel) -> Layout:
    state = example_state(compiled.placement, compiled.prefill)
    state.reserve(4)
    return Layout.of(compiled.placement, state)


@pytest.mark.parametrize("rows", [1, 4, 8, 12])
def test_rows_of_heads(rows: int) -> None:
    """One for all heads, one for each, and several for each: those of its query heads."""
    x = torch.arange(rows)
    assert torch.equal(Heads(0, 4, 4).of(x), x)
    expected = x if rows == 1 else x[rows // 4 : 3 * rows // 4]
    assert torch.equal(Heads(1, 3, 4).of(x), expected)


@pytest.mark.parametrize(
    ("method", "budget", "options"),
    [
        ("quest", 0.25, {}),
        ("sekv", 0.25, {"coarse": True, "fill": False, "router": "trained"}),
        ("mixed", 0.3, {}),
    ],
)
def test_rows_have_the_shapes_of_the_step(
    full: CompiledModel, method: str, budget: float, options: dict[str, Any]
) -> None:
    """Also what an index has for each query head, and a layer whose share holds all its tokens, so that it folds none."""
    compiled = of(full, method, budget, **options)
    step = layout(compiled)
    rows = rows_of(step, reserved(compiled, (700, 523), 4))
    assert rows.state.keys() == step.fields.keys()
    sizes: dict[str, int] = {}
    for name, field in step.fields.items():
        assert rows.state[name].dtype == field.dtype
        assert len(rows.state[name]) == 2
        for size, told in zip(rows.state[name].shape[1:], field.shape[1:]):
            assert size == (told if isinstance(told, int) else sizes.setdefault(told, size)), name


def test_a_layer_that_keeps_all_of_its_tokens_is_exported_so(full: CompiledModel) -> None:
    compiled = of(full, "mixed", 0.3)
    memories = example_state(compiled.placement, compiled.prefill).rows[0].budgeted()
    assert {memory.reads_units for memory in memories if memory.unfolds} == {True, False}
