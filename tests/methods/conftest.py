"""The bundled model, and what every method's rows must hold to."""

from __future__ import annotations

import pytest
import torch

from semkv import bundled
from semkv.api import compile as compile_model
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.runtime.state import State
from semkv.runtime.store.roomy import room_for


@pytest.fixture(scope="session")
def whole() -> CompiledModel:
    """The bundled model as `full`, its KV in half precision."""
    model, _ = bundled.load()
    return compile_model(
        model, bundled.profile(), method="full", config=CompileConfig(floor=0, kv_dtype="float16", cache=True)
    )


@pytest.fixture(scope="session")
def prompt():
    """`prompt(tokens, seed) -> ids int64 [1, tokens]` of the bundled model's vocabulary."""

    def draw(tokens: int, seed: int) -> torch.Tensor:
        return torch.randint(3, 600, (1, tokens), generator=torch.Generator().manual_seed(seed))

    return draw


def allocated_bytes(row) -> int:
    """The storages behind all that a row has on the device."""
    tensors = []
    for memory in row.budgeted():
        tensors += [*memory.kept.buffers, *memory.recent.buffers]
        tensors += memory.spans.device_tensors() if memory.spans else []
        tensors += memory.slots.tensors.values() if memory.slots else []
        tensors += memory.factors.there.tensors if memory.factors.there else []
    read = sum(
        memory.factors.nbytes for memory in row.budgeted() if not memory.factors.there
    )  # where they wait, by a graph
    return read + sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def held_bytes(row) -> int:
    """What a row has on the device, counted tensor by tensor, summaries and indexes with the room that steps read them with."""
    held = 0
    for memory in row.budgeted():
        held += memory.kept.nbytes + memory.recent.nbytes
        units = memory.spans.count if memory.spans else 0
        held += sum(x[:, :1].nbytes * room_for(units) for x in memory.spans.device_tensors()) if units else 0
        held += memory.slots.nbytes if memory.slots else 0
        held += memory.factors.nbytes
    return held


@pytest.fixture(scope="session")
def held():
    """`held_bytes`."""
    return held_bytes


@pytest.fixture(scope="session")
def grown(prompt):
    """`grown(compiled, tokens, steps, size) -> state` after a prompt and some steps, its budget having been held at each."""

    def run(compiled: CompiledModel, tokens: int, steps: int, size: int) -> State:
        state = compiled.prefill(prompt(tokens, 1))
        for seed in range(steps):
            compiled.extend(state, prompt(size, seed))
            row = state.rows[0]
            assert held_bytes(row) == row.device_nbytes() == state.nbytes["device"]
            assert allocated_bytes(row) <= row.device_nbytes() <= row.cap_bytes(row.tokens)
        assert state.stats.peak_share <= 1
        return state

    return run
