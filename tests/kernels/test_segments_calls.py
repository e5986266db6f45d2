"""Decode steps of the bundled model as they run: one call of C++ each, which gives what the nodes of its graph give one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import semkv
from semkv import compiled as compiled_module
from semkv.kernels.cpp import compiler
from semkv.kernels.segments import Segment, whole

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
WHERE = pytest.mark.xfail(
    strict=True, reason="places.where has room of its own, and not one for each place that tokens wait at"
)
METHODS = ["full", "snapkv", "quest", "sketch", pytest.param("sekv", marks=WHERE)]
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


@pytest.mark.parametrize("method", METHODS)
def test_a_real_step_is_one_call(method, prompt, monkeypatch):
    """Long enough for memories to grow between steps."""
    fused = compiled_by(method)
    got = decoded(fused, prompt)
    assert [type(run) for run in runs(fused)] == [Segment]
    assert [run.reason for run in runs(fused)] == [None]
    assert len(runs(fused)[0]._tapes) > 1
    monkeypatch.setattr(compiled_module, "as_step", lambda kernels, dtype, module: module)
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


def test_whole_numbers_beyond_float32_stay_what_they_are():
    x = torch.tensor([(1 << 40) + 1, -(1 << 53) - 1], dtype=torch.int64)
    step = whole(make_fx(lambda x: (x.floor(), x.ceil(), x.round()))(x))
    with torch.no_grad():
        assert all(torch.equal(found, x) for found in step(x))
    assert step.reason is None
