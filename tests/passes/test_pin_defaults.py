"""A graph names its dtypes and devices: the defaults of the process that runs it change nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from semkv.capture.export import capture
from semkv.errors import SpecError
from semkv.ir import spec
from semkv.ir.defaults import reads_default
from semkv.ir.program import Program
from semkv.passes.base import PassOptions
from semkv.passes.canonicalise import Canonicalise
from semkv.passes.pin_defaults import PinDefaults

aten = torch.ops.aten
VOCAB, HIDDEN = 5003, 6


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def other_default(request) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


class Model(nn.Module):
    """An embedding, plus what `extra` makes of ids and positions, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding.from_pretrained(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.lm_head = nn.Linear(HIDDEN, 8)
        nn.init.uniform_(self.lm_head.weight, generator=generator)
        nn.init.zeros_(self.lm_head.bias)
        self.eval()

    def forward(self, input_ids, position_ids):
        return self.lm_head(self.embed(input_ids) + self.extra(input_ids, position_ids)[..., None])


EXTRAS = {
    "ones": lambda ids, at: torch.ones(ids.shape[1]) * at.float(),
    "zeros of a length": lambda ids, at: torch.zeros(at.shape[1]).cumsum(0) + 0.1 + at.float(),
    "full": lambda ids, at: torch.full((ids.shape[1],), 0.1) + at.float(),
    "arange of fractions": lambda ids, at: torch.arange(0.0, 0.7, 0.1).sum() + at.float(),
    "linspace": lambda ids, at: torch.linspace(0, 1, 7)[1] * at.float(),
    "scalar_tensor": lambda ids, at: torch.scalar_tensor(0.1) * at.float(),
    "whole times a fraction": lambda ids, at: (at + 4099) * 0.1,
    "whole plus a fraction": lambda ids, at: at + 4097.5,
    "division of whole numbers": lambda ids, at: (at + 4099) / (ids + 3),
    "division by a number": lambda ids, at: (ids + 4099) / 7,
    "sine of whole numbers": lambda ids, at: torch.sin(at + 1001),
    "root of whole numbers": lambda ids, at: torch.rsqrt(at + 4099),
    "power": lambda ids, at: 0.99 ** (at + 3),
    "bool times a fraction": lambda ids, at: (at > 3) * 0.1,
    "where of two numbers": lambda ids, at: torch.where(at > 3, 0.1, 0.7),
    "where of a whole number": lambda ids, at: torch.where(at > 3, at + 4099, 0.7),
    "comparison with a fraction": lambda ids, at: (ids + 4096 >= 4097.5).float(),
    "clamp": lambda ids, at: (at + 4097).clamp(min=0.5),
    "remainder": lambda ids, at: (ids + 4099) % 0.7,
}
"""What a model may do with whole numbers in a forward; each result has the default dtype, or is computed in it."""


def made(name: str) -> Model:
    model = Model()
    model.extra = EXTRAS[name]
    return model


def pinned(model: Model) -> tuple[Program, Program]:
    """The program before and after the pass."""
    options = PassOptions()
    before = Canonicalise().run(capture(model), options)
    return before, PinDefaults().run(before, options)


IDS = torch.arange(2, dtype=torch.int64)[:, None] * 7 + torch.arange(40, dtype=torch.int64)
POSITIONS = torch.arange(40, dtype=torch.int64).expand(2, 40)


def moved(program: Program, dtype: torch.dtype) -> torch.Tensor | None:
    """What the program computes under this default dtype; None where its dtypes do not fit each other any more."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return program.body(IDS, POSITIONS)
    except RuntimeError:
        return None
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", EXTRAS)
def test_another_default_dtype_changes_nothing(name: str) -> None:
    model = made(name)
    before, after = pinned(model)
    wanted = model(IDS, POSITIONS)
    assert torch.equal(after.body(IDS, POSITIONS), wanted)
    bare = 0
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(moved(after, dtype), wanted)
        untouched = moved(before, dtype)
        bare += untouched is None or not torch.equal(untouched, wanted)
    assert bare, "the graph without the pass must depend on the default, or this shows nothing"
    assert any(map(reads_default, before.body.graph.nodes))
    assert not any(map(reads_default, after.body.graph.nodes))


def test_a_capture_under_another_default_computes_what_it_did_there(other_default: torch.dtype) -> None:
    model = made("whole times a fraction")
    torch.set_default_dtype(other_default)
    _, after = pinned(model.double() if other_default == torch.float64 else model)
    wanted = model(IDS, POSITIONS)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(after.body(IDS, POSITIONS), wanted)


class Silent(Model):
    """Everything is named already, or has nothing to do with a default."""

    def extra(self, ids, at):
        steps = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
        named = torch.full((ids.shape[1],), 0.5, dtype=torch.float32, device=ids.device)
        whole = torch.where(at > 3, at * 2, 7) // 3 + steps
        return named * whole.float() * 0.1 + torch.zeros_like(whole) + self.embed(ids).sum(-1) * whole


def test_a_graph_that_names_them_is_left_alone() -> None:
    before, after = pinned(Silent())
    assert after is before


def test_integers_keep_their_dtype() -> None:
    """`arange` of whole numbers and a division that rounds are int64 under any default."""
    model = Model()
    model.extra = lambda ids, at: (torch.arange(ids.shape[1]) + at.div(3, rounding_mode="floor")).float() * 1e-3
    _, after = pinned(model)
    (steps,) = (n for n in after.body.graph.nodes if n.target in (aten.arange.default, aten.arange.start_step))
    assert steps.kwargs["dtype"] == torch.int64
    assert steps.kwargs["device"] == torch.device("cpu")
    assert not any(n.target == aten.to.dtype and n.args[1] != torch.float32 for n in after.body.graph.nodes)
    assert torch.equal(moved(after, torch.bfloat16), model(IDS, POSITIONS))


def test_the_spec_refuses_what_the_pass_leaves_no_more() -> None:
    _, program = pinned(made("ones"))
    graph = program.body.graph
    node = next(n for n in graph.nodes if n.target == aten.ones.default)
    node.kwargs = {}
    with pytest.raises(SpecError, match=r"aten\.ones\.default .* takes its dtype from the default"):
        spec.check(program.evolve(stage="found", sites=()))
