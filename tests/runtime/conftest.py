"""A small decoder with realistic head dims, compiled by any method without capture of a model library's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from semkv.capture.dependence import CheckDependence
from semkv.compiled import CompiledModel
from semkv.compiler.pipeline import run_passes
from semkv.config import CompileConfig
from semkv.ir.program import Program
from semkv.methods import find_method
from semkv.passes.base import PassOptions
from semkv.passes.lift_positions import LiftPositions
from semkv.passes.surprisal_head import SurprisalHead
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.store.roomy import room_for

VOCAB = 61
UNTRAINED = {"sekv": {"router": "coarse"}, "compresskv": {"selection": "all", "allocation": "uniform"}}
"""Options with which a method runs without a profile."""


def understood(program: Program) -> Program:
    """A found-stage program after the passes that stand between finding attention and lowering."""
    passes = (LiftPositions(), CheckDependence(), SurprisalHead())
    return run_passes(program, passes, PassOptions(), ran=["canonicalise", "find_attention"])


@pytest.fixture(scope="session")
def wide_program(decoder_class, make_found) -> Program:
    """Three layers with 4 query and 2 KV heads of 64 dims, the middle one with a window of 8."""
    decoder = decoder_class()
    layer_class = type(decoder.layers[0])
    torch.manual_seed(3)
    decoder.layers = nn.ModuleList(layer_class(i, 32, 4, 2, 64, window) for i, window in enumerate((0, 8, 0)))
    return understood(make_found(decoder.eval(), vocab_size=VOCAB, max_length=1 << 17))


@pytest.fixture(scope="session")
def double_program(decoder_program) -> Program:
    """The float64 decoder of the common fixtures: heads of 8 dims."""
    return understood(decoder_program)


@pytest.fixture(scope="session")
def compile_as() -> Callable[..., CompiledModel]:
    """`compile_as(program, method, budget, options={...}, **config) -> CompiledModel`."""

    def make(program, method, budget=None, *, options=None, **config) -> CompiledModel:
        options = UNTRAINED.get(method, {}) | (options or {})
        return CompiledModel(
            program, None, find_method(method, options), budget, CompileConfig(**{"floor": 0, **config})
        )

    return make


def storages(tensors: Iterator[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def resident_nbytes(row: RowMemory) -> int:
    """Bytes of the device tensors of the budgeted stores, found by walking the memory: whole storages, not its own count, but for pages
    that a store without a budget has ahead. Summaries and indexes that no step has read yet have the room that it will give them."""
    total = 0
    for memory in row.budgeted():
        tensors = [x for part in (memory.kept, memory.recent) for x in part.buffers]
        if memory.spans is not None and memory.spans.count:
            own = memory.spans.device_tensors()
            room = sum(x[:, :1].nbytes * room_for(memory.spans.count) for x in own)
            assert storages(iter(own)) <= room
            total += room
        if memory.slots is not None:
            tensors += memory.slots.tensors.values()
        if memory.factors.there is not None:
            tensors += memory.factors.there.tensors
        else:  # a graph reads them where they wait
            total += memory.factors.nbytes
        total += storages(iter(tensors)) - memory.reserved_nbytes
    return total


def folded_nbytes(row: RowMemory) -> int:
    """Bytes of what the budgeted stores keep on the host, tables included, found by walking the memory."""
    total = 0
    for memory in row.budgeted():
        spans = memory.spans
        if spans is None:
            continue
        tables = [x for name, x in vars(spans.tables).items() if name.startswith("segment_")]
        tables += [] if memory.components.summary is not None else [spans.lengths, spans.positions]
        factors = spans.host_factors
        tables += [
            factors.offsets,
            factors.key_rank,
            factors.value_rank,
            factors.lengths,
            spans.retired.data,
            spans.tables.mass,
        ]
        total += sum(x.nbytes for x in tables)
        total += sum(part.data.nbytes for part in (*spans.host_tokens.parts.values(), factors.numbers))
    return total


@pytest.fixture(scope="session")
def resident() -> Callable[[RowMemory], int]:
    """`resident(row)`: device bytes of the budgeted stores."""
    return resident_nbytes


@pytest.fixture(scope="session")
def folded() -> Callable[[RowMemory], int]:
    """`folded(row)`: host bytes of the budgeted stores."""
    return folded_nbytes


@pytest.fixture
def prompt() -> Callable[..., Tensor]:
    """`prompt(n, rows=1, seed=0)`: random ids [rows, n]."""

    def make(n: int, rows: int = 1, seed: int = 0) -> Tensor:
        return torch.randint(0, VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))

    return make
