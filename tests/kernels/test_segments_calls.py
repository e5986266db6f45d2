"""Decode steps of the bundled model as they run: one call of C++ each, which gives what the nodes of its graph give one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import semkv
from semkv import compiled as compiled_module
from semkv.compiler.kernel_builds import as_step
from semkv.kernels.cpp import compiler
from semkv.kernels.segments import Segment, whole
from tests.conftest import quick_ones

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
METHODS = ["full", "snapkv", "quest", "sketch", "sekv"]
STEPS = 100


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return torch.randint(5, 500, (1, 3000), generator=torch.Generator().manual_seed(0))


def compiled_by(method: str) -> semkv.Compiled:
    model, _ = semkv.bundled.load()
    budget = {} if method == "full" else {"budget": 0.1}
    return semkv.compile(model, semkv.bundled.profile(), method=method, **budget)


def decoded(compiled: semkv.Compiled, prompt: Tensor) -> Tensor:
    """Logits [STEPS, V] of steps with tokens that do not depend on them."""
    state, made = compiled.prefill(prompt), []
    for step in range(STEPS):
        made.append(compiled.extend(state, prompt[:, 7 * step : 7 * step + 1])[0, -1])
    return torch.stack(made)


def runs(compiled: semkv.Compiled) -> list[object]:
    return [graph.run for graph in compiled.placement.steps.graphs._graphs.values()]


@pytest.mark.parametrize("method", quick_ones(METHODS, ["sketch"]))
def test_a_real_step_is_one_call(method, prompt, monkeypatch):
    """Long enough for memories to grow between steps."""
    fused = compiled_by(method)
    got = decoded(fused, prompt)
    assert [type(run) for run in runs(fused)] == [Segment]
    assert [run.reason for run in runs(fused)] == [None]
    assert len(runs(fused)[0]._known.tapes) > 1 or method == "sekv"
    monkeypatch.setattr(compiled_module, "as_step", lambda kernels, dtype, module: as_step("torch", dtype, module))
    plain = compiled_by(method)
    expected = decoded(plain, prompt)
    assert not any(isinstance(run, Segment) for run in runs(plain))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-3)


def test_other_kernels_are_asked_node_by_node(prompt):
    model, _ = semkv.bundled.load()
    compiled = semkv.compile(model, config=semkv.CompileConfig(kernels="torch", floor=0))
    compiled.extend(compiled.prefill(prompt[:, :50]), prompt[:, :1])
    assert not any(isinstance(run, Segment) for run in runs(compiled))


def test_numbers_that_pytorch_wraps_around_are_refused():
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    module = make_fx(lambda x: (x > -3, x.clamp(min=-3)))(x)
    step = whole(module)
    with torch.no_grad():
        assert all(map(torch.equal, step(x), module(x)))
    assert "the number -3 beside tensors of uint8" in step.reason


def test_numbers_that_no_instruction_knows_are_refused():
    x, phase = torch.ones(3), torch.polar(torch.ones(2), torch.arange(2.0))
    module = make_fx(lambda x, phase: (x * 2, phase[None]))(x, phase)
    step = whole(module)
    with torch.no_grad():
        assert all(map(torch.equal, step(x, phase), module(x, phase)))
    assert "numbers of torch.complex64" in step.reason


def test_whole_numbers_beyond_float32_stay_what_they_are():
    x = torch.tensor([(1 << 40) + 1, -(1 << 53) - 1], dtype=torch.int64)
    step = whole(make_fx(lambda x: (x.floor(), x.ceil(), x.round()))(x))
    with torch.no_grad():
        assert all(torch.equal(found, x) for found in step(x))
    assert step.reason is None


# -- graphs that are cut -----------------------------------------------------------------------------------------------


def numbered(x: Tensor, index: Tensor) -> Tensor:
    """Eight operators that there are instructions for, at least."""
    return ((x * 2 + 1).exp() - x.tanh()).clamp(min=-3) / (index + 2) + x.sum(-1, keepdim=True)


def with_experts(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = numbered(x, x[:, :1])
    best, which = y.topk(2)
    z = numbered(best @ weight, which.float().sum(-1, keepdim=True))
    return z, which


def with_state(x: Tensor, state: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """Writes to views of inputs in and between parts, which later ones read."""
    row = state[1]
    row.add_(x[0])
    y = numbered(x, row[None, :1])
    order = y.sort(-1)[1]
    state[:, 2:4].mul_(2)
    z = numbered(state, row[:1]) + order.sum()
    count.copy_(order[0, 0])
    found = z.sort(-1)[0]
    row.copy_(found[0])
    return numbered(state, row[:1]), row, numbered(found, count + 0.5), count


def with_sizes(x: Tensor, state: Tensor, count: Tensor) -> Tensor:
    first, second = x.split([2, x.shape[1] - 2], 1)
    y = numbered(second, first[:, :1])
    values, places = y.sort(-1)
    kept = values.unbind(0)
    return numbered(torch.stack([kept[0] * y.shape[1], kept[-1]]), places[:1, :1]).flip(0)


def x_and_state() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 6, generator=generator), torch.randn(3, 6, generator=generator), torch.tensor(7)


@pytest.mark.parametrize(("function", "calls"), [(with_state, 3), (with_sizes, 2)])
def test_a_graph_is_cut_at_what_is_not_known(function, calls):
    module = make_fx(function, pre_dispatch=True)(*x_and_state())
    step, mine, theirs = whole(module), x_and_state(), x_and_state()
    with torch.no_grad():
        for _ in range(3):
            found, expected = step(*mine), module(*theirs)
            for one, other in zip([*mine, *found], [*theirs, *expected], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert "sort" in step.reason
    (parts,) = step._known.cuts.values()
    made = [
        node.target.__closure__[0].cell_contents for node in parts.graph.nodes if str(node.name).startswith("part_")
    ]
    assert [part.reason for part in made] == [None] * calls


def test_experts_are_chosen_between_two_calls():
    x, weight = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), torch.ones(2, 9)
    module = make_fx(with_experts)(x, weight)
    step = whole(module)
    with torch.no_grad():
        for one, other in zip(step(x, weight), module(x, weight), strict=True):
            torch.testing.assert_close(one, other)
    assert "topk" in step.reason
    assert len(step._known.cuts) == 1


def test_what_is_written_is_not_returned_twice():
    """A buffer and a view of it, of which one is written to later, would be two tensors."""

    def function(x: Tensor) -> Tensor:
        made = numbered(x, x[:, :1])
        part = made[:, :2]
        order = made.sort(-1)[1]
        made.add_(order)
        return part + made[:, 2:4]

    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    module = make_fx(function)(x)
    step = whole(module)
    with torch.no_grad():
        torch.testing.assert_close(step(x), module(x))
    assert list(step._known.cuts.values()) == [module]
