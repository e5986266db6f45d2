"""Room made ahead of steps: nothing is folded and no size changes while they take it up."""

from __future__ import annotations

import pytest
import torch

import semkv
from semkv.compiled import CompiledModel
from semkv.errors import BudgetError, ConfigError
from semkv.runtime.state import State
from tests.export.steps import BUDGETS, prompts

METHODS = {name: budget for name, budget in BUDGETS.items() if name != "mixed"} | {"streaming_llm": 0.25}


@pytest.fixture(scope="module")
def full() -> CompiledModel:
    model, _ = semkv.bundled.load()
    return semkv.compile(model, method="full", profile=semkv.bundled.profile())


def _sizes(state: State) -> list[dict[str, tuple[int, ...]]]:
    return [
        {name: tuple(x.shape) for name, x in memory.step_tensors().items()}
        for row in state.rows
        for memory in row.memories()
    ]


def _units(state: State) -> list[tuple[int, int]]:
    return [
        (memory.kept.length, -1 if memory.spans is None else memory.spans.count)
        for row in state.rows
        for memory in row.memories()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_folded_and_no_size_changes(full: CompiledModel, method: str) -> None:
    budget = METHODS[method]
    compiled = full.with_method(method, budget, config=semkv.CompileConfig(floor=0))
    state = compiled.prefill(*prompts(compiled.program.vocab_size, (700, 523)))
    state.reserve(30)
    assert state.reserved == 30
    before, sizes = _units(state), _sizes(state)
    ids = state.logits.argmax(-1, keepdim=True)
    for left in reversed(range(30)):
        ids = compiled.extend(state, ids).argmax(-1).view(2, 1)
        assert state.reserved == left
        assert _units(state) == before
        assert _sizes(state) == sizes
    assert state.stats.peak_share <= 1
    for _ in range(40):  # memory is managed as ever
        ids = compiled.extend(state, ids).argmax(-1).view(2, 1)
    assert state.reserved == 0
    assert state.stats.peak_share <= 1


def test_tokens_that_have_room_without_it_are_read_alike(full: CompiledModel) -> None:
    state = full.prefill(*prompts(full.program.vocab_size, (90, 60)))
    ahead = state.fork()
    ahead.reserve(20)
    assert ahead.fork().reserved == 20
    for _ in range(20):
        ids = state.logits.argmax(-1, keepdim=True)
        torch.testing.assert_close(full.extend(state, ids), full.extend(ahead, ids), rtol=1e-4, atol=1e-4)


def test_a_longer_step_ends_it(full: CompiledModel) -> None:
    compiled = full.with_method("quest", 0.25, config=semkv.CompileConfig(floor=0))
    state = compiled.prefill(*prompts(compiled.program.vocab_size, (700,)))
    state.reserve(4)
    compiled.extend(state, torch.zeros(1, 9, dtype=torch.int64))
    assert state.reserved == 0
    state.reserve(4)
    state.reserve(0)
    assert state.reserved == 0


def test_what_does_not_fit_is_refused_and_changes_nothing(full: CompiledModel) -> None:
    compiled = full.with_method("quest", 100)
    state = compiled.prefill(*prompts(compiled.program.vocab_size, (700,)))
    sizes = _sizes(state)
    with pytest.raises(BudgetError, match=r"no room for 200 tokens ahead in .*reserve at most about"):
        state.reserve(200)
    assert _sizes(state) == sizes
    assert state.reserved == 0
    with pytest.raises(ConfigError, match=r"reserve\(-1\)"):
        state.reserve(-1)
