"""A decode step, memory and all, as one recorded graph on a pretended CUDA device: a stand-in records and replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from semkv import bundled
from semkv.api import compile as compile_model
from semkv.capture.device import moved
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.methods import find_method
from semkv.runtime.host.pool import HostTokens
from tests.conftest import quick_ones
from tests.kernels.test_cuda_graphs import Recorder
from tests.methods.test_step_graphs import CASES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is there needs no pretence")

HERE = {case: given for case, given in CASES.items() if given[0] != "specontext" and case != "mixed, all"}
"""Captures of retrieval heads are not pretended."""
QUICK = ("snapkv",)
MOVING = ("h2o", "pyramidkv", "heterocache")
"""Methods that let go of tokens in each step, or every few, so that what is kept moves."""
PROMPT, STEPS = 330, 30


@pytest.fixture(scope="module")
def base() -> CompiledModel:
    model, _ = bundled.load()
    config = CompileConfig(floor=0, kv_dtype="float16", cache=True)
    return compile_model(model, bundled.profile(), method="full", config=config)


@pytest.fixture
def recorded(pretended_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pretended device: what a GPU reads of the host's memory is that memory, and a stand-in is its recorder."""
    monkeypatch.setattr("semkv.compiler.kernel_builds.CudaRecorder", lambda device: Recorder())
    monkeypatch.setattr("semkv.runtime.store.mirror.mapped", lambda x, device: pretended_cuda.mark(x.view(x.shape)))
    monkeypatch.setattr(HostTokens, "locked", True)
    Recorder.made = Recorder.replays = 0
    return pretended_cuda


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(3, 600, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", quick_ones(HERE, QUICK))
def test_a_recorded_step_gives_the_tokens_of_the_cpu(base: CompiledModel, recorded: Any, case: str) -> None:
    """Over steps in which windows fold and units are added; most steps are replayed, and none mixes devices."""
    method, budget, options = CASES[case]
    config = CompileConfig(floor=0, kv_dtype="float16", kernels="torch", cuda_graphs="step", method_options=options)
    here = base.with_method(method, budget, config=config.model_copy(update={"cuda_graphs": None}), **options)
    source = moved(base._source, "cuda")
    for module in (source.body, source.head):
        recorded.move(module)
    there = CompiledModel(source, base.profile, find_method(method, options), budget, config)
    for module in (there.program.prefill, there.program.extend, there.program.decode):
        recorded.move(module)  # passes lay out weights anew
    assert there.placement.steps is not None
    apart, same = list[float](), list[bool]()
    states = here.prefill(ids(PROMPT, 1)), there.prefill(recorded.mark(ids(PROMPT, 1)))
    for one in ids(STEPS, 2).split(1, 1):
        wanted, found = here.extend(states[0], one), there.extend(states[1], recorded.mark(one.clone()))
        assert found.is_cuda
        apart.append(float((found.cpu() - wanted).abs().max()))
        same.append(int(found.cpu().argmax()) == int(wanted.argmax()))
    assert all(same)
    assert (
        sorted(apart)[int(0.9 * STEPS)] < 2e-3
    )  # where two scores are equal but for their rounding, either may be chosen
    assert case in MOVING or Recorder.replays > STEPS // 2
