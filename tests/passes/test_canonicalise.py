"""Canonical graphs hold plain ATen, each value once, and compute exactly what was captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from semkv.capture.export import capture
from semkv.errors import CaptureError
from semkv.ir.program import Program
from semkv.passes.base import PassOptions
from semkv.passes.canonicalise import Canonicalise

aten = torch.ops.aten
VOCAB, HIDDEN = 31, 12


class Model(nn.Module):
    """Embedding, `body`, projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.double().eval()

    def forward(self, input_ids):
        return self.lm_head(self.body(self.embed(input_ids)))

    def body(self, x):
        raise NotImplementedError


class NoOps(Model):
    def body(self, x):
        x = F.dropout(x, 0.5, training=False).detach().clone()
        x = x.to(torch.float64).expand(-1, -1, -1)[:, :, :]
        x = x.transpose(1, 2).contiguous().view(x.shape[0], -1).view(x.shape[0], HIDDEN, -1).transpose(1, 2)
        return self.inner(x)


class Twice(Model):
    """The same subexpression three times, and one that differs in a number's type only."""

    def body(self, x):
        return self.inner(x * 2) + self.inner(x * 2) + self.inner(x * 2.0) + self.inner(x * 3)


class Regions(Model):
    def body(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.inner(x)
        with torch.enable_grad():
            x = x * torch.sigmoid(x)
        return x


class Autocast(Model):
    def body(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).double()


class Upcast(Model):
    """A softmax in another dtype, and a promotion that must stay."""

    def body(self, x):
        weights = x.float().softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.inner(weights * x)


class Einsum(Model):
    def body(self, x):
        x = torch.einsum("btd,ed->bte", x, self.inner.weight)
        scores = torch.einsum("bqd,bkd->bqk", x, x)
        split = x.view(x.shape[0], x.shape[1], 3, 4)
        heads = torch.einsum("bqhd,bkhd->bhqk", split, split)
        return torch.einsum("bhqk,bkhd->bqhd", heads.tril(), split).reshape(x.shape) + scores.tril() @ x


class Empty(Model):
    """What is put behind an empty cache, and between two."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.empty(0, dtype=torch.float64))

    def body(self, x):
        x = torch.cat([self.nothing, x], dim=-2)
        return self.inner(torch.cat([self.nothing, x, self.nothing, 2 * x], dim=-1).unflatten(-1, (2, -1)).sum(-2))


class Random(Model):
    """Two draws are two values."""

    def body(self, x):
        return x + torch.rand_like(x) - torch.rand_like(x)


def canonical(module: nn.Module) -> tuple[Program, Program]:
    captured = capture(module)
    return captured, Canonicalise().run(captured, PassOptions())


def count(program: Program, *targets) -> int:
    return sum(node.target in targets for node in program.body.graph.nodes)


@pytest.mark.parametrize("kind", [NoOps, Twice, Regions, Upcast, Einsum, Empty])
def test_values_are_exactly_those_of_the_model(kind) -> None:
    module = kind()
    _, program = canonical(module)
    for batch, length in ((2, 63), (1, 111)):
        ids = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            expected, result = module(ids), program.body(ids, torch.arange(length).expand(batch, length))
        torch.testing.assert_close(result, expected, rtol=1e-12 if kind is Einsum else 0.0, atol=0.0)


def test_what_does_nothing_is_removed() -> None:
    captured, program = canonical(NoOps())
    idle = (aten.dropout.default, aten.detach.default, aten.clone.default, aten.contiguous.default, aten.slice.Tensor)
    assert count(captured, *idle) >= 4
    assert count(program, *idle, aten.to.dtype, aten.expand.default, aten.view.default) == 0
    assert count(program, aten.reshape.default) == 2


def test_operands_that_hold_nothing_are_left_out() -> None:
    captured, program = canonical(Empty())
    assert count(captured, aten.cat.default) == 2
    (node,) = (node for node in program.body.graph.nodes if node.target == aten.cat.default)
    assert len(node.args[0]) == 2


def test_equal_subexpressions_are_computed_once() -> None:
    captured, program = canonical(Twice())
    assert count(captured, aten.linear.default) == 5
    assert count(program, aten.linear.default) == 4, "x * 2 twice is one value; 2.0 is another argument than 2"


def test_regions_are_inlined() -> None:
    captured, program = canonical(Regions())
    wrapped = [n for n in captured.body.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    assert wrapped
    assert not [n for n in program.body.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    assert count(program, aten.sigmoid.default) == 1
    assert not [n for n in program.body.graph.nodes if "assert" in str(n.target)]


def test_a_region_that_casts_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"a region under torch\.autocast casts where the graph does not show it"):
        canonical(Autocast())


def test_conversions_that_change_the_dtype_stay() -> None:
    _, program = canonical(Upcast())
    assert count(program, aten.to.dtype) >= 2
    assert count(program, aten.softmax.int) == 1


def test_einsum_becomes_matmul() -> None:
    captured, program = canonical(Einsum())
    assert count(captured, aten.einsum.default) == 4
    assert count(program, aten.einsum.default) == 0
    assert count(program, aten.matmul.default) >= 4


def test_random_draws_are_not_merged() -> None:
    captured, program = canonical(Random())
    assert count(captured, aten.rand_like.default) == count(program, aten.rand_like.default) == 2


def test_every_node_says_where_it_comes_from() -> None:
    captured, program = canonical(Einsum())
    assert all("origin" not in node.meta for node in captured.body.graph.nodes), "the input stays as it was"
    origins = {node.meta["origin"] for node in program.body.graph.nodes if node.op == "call_function"}
    assert "model: canonicalise" in origins
    assert any(origin.endswith(": capture") for origin in origins)
