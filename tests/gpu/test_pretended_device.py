"""Steps never mix devices: the runtime runs on a pretended CUDA device, where PyTorch's refusals are imitated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import semkv
from semkv.capture.device import moved
from semkv.compiled import CompiledModel
from semkv.compiler.offload import offload_demand
from semkv.errors import StateError
from semkv.live.model import LiveModel
from semkv.methods import find_method
from tests.eager_steps import eagerly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is there needs no pretence")

VOCAB, PROMPT, NEW = 61, 120, 12
REAL: dict[str, Any] = {"kernels": "torch", "cuda_graphs": False}
"""A GPU's kernels and graphs cannot be pretended."""


@pytest.fixture(scope="module")
def model(llama: Any) -> Any:
    return llama(VOCAB, 32, 4)


@pytest.fixture(scope="module")
def base(model: Any) -> Any:
    return semkv.compile(model, config=semkv.CompileConfig(floor=0))


def _moved(
    base: Any, mode: Any, method: str, budget: float | None, settings: semkv.CompileConfig, model: Any = None
) -> Any:
    """`base` on the pretended GPU, under another method; it follows `model`, on the CPU."""
    source = moved(base._source, "cuda")
    for module in (source.body, source.head):
        mode.move(module)  # parameters are made without the functions that the mode sees
    live = None if model is None else LiveModel(model, source, torch.device("cuda"))
    return CompiledModel(source, None, find_method(method, settings.method_options), budget, settings, live=live)


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("streaming_llm", 300)])
def test_copies_on_another_device_follow_the_model(
    base: Any, model: Any, pretended_cuda: Any, method: str, budget: Any
) -> None:
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    ids = torch.randint(1, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    there = _moved(base, pretended_cuda, method, budget, semkv.CompileConfig(**REAL), model)
    state = there.prefill(pretended_cuda.mark(ids.clone()))
    held = {name: x.data_ptr() for name, x in there.named_parameters()}
    assert not set(held.values()) & {x.data_ptr() for x in model.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        wanted = model(ids).logits[:, -1]
    with pytest.raises(StateError, match="made before the model's weights changed"):
        there.extend(state, pretended_cuda.mark(ids[:, :2].clone()))
    got = there.prefill(pretended_cuda.mark(ids.clone())).logits
    assert got.is_cuda
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert {name: x.data_ptr() for name, x in there.named_parameters()} == held, "written in place"
    model.load_state_dict(weights)


def test_a_mix_of_devices_is_seen(pretended_cuda: Any) -> None:
    there = pretended_cuda.mark(torch.ones(3))
    with pytest.raises(
        RuntimeError, match=r"expected all tensors to be on the same device, got cuda \(3,\), cpu \(3,\)"
    ):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="indices on cuda for a tensor on the CPU"):
        torch.ones(3)[there.long()]
    with pytest.raises(TypeError, match="cannot convert a CUDA tensor to numpy"):
        there.numpy()


def test_places_follow_moves(pretended_cuda: Any) -> None:
    there = torch.ones(3, device="cuda")
    assert there.device == torch.device("cuda:0")
    assert there.is_cuda
    assert (there + 1).device.type == "cuda"
    assert there.cpu().device.type == "cpu"
    assert torch.zeros(2).to(there.device).is_cuda
    assert float(there.sum()) == 3.0


FACTORED = {"router": "untrained", "forms": "factored", "routing": "mean"}
CASES = [
    pytest.param("full", None, {}, id="full"),
    pytest.param("streaming_llm", 0.4, {}, id="streaming_llm", marks=pytest.mark.slow),
    pytest.param("snapkv", 0.4, {}, id="snapkv"),
    pytest.param("sekv", 0.5, {"router": "coarse"}, id="sekv-coarse", marks=pytest.mark.slow),
    pytest.param("sekv", 0.5, FACTORED, id="sekv-untrained-factored-mean"),
]


@pytest.mark.parametrize(("method", "budget", "options"), CASES)
def test_a_conversation_stays_on_its_device(
    base: Any, pretended_cuda: Any, method: str, budget: float | None, options: dict[str, Any]
) -> None:
    settings = semkv.CompileConfig(floor=0, method_options=options, **REAL)
    ids = torch.randint(1, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    wanted = eagerly(base.with_method(method, budget, config=settings, **options)).generate(
        ids, max_new_tokens=NEW, do_sample=False
    )
    there = _moved(base, pretended_cuda, method, budget, settings)
    assert there.device.type == "cuda"
    out = there.generate(pretended_cuda.mark(ids.clone()), max_new_tokens=NEW, do_sample=False)
    assert out.is_cuda
    assert out.tolist() == wanted.tolist()
    state = there.prefill(pretended_cuda.mark(ids.clone()))
    there.extend(state.fork(), pretended_cuda.mark(ids[:, :20].clone()))
    assert state.logits.is_cuda
    for memory in state.rows[0].memories():
        held: list[Tensor] = [*memory.kept.buffers, *memory.recent.buffers]
        assert all(tensor.is_cuda for tensor in held)
        assert memory.spans is None or not any(part.data.is_cuda for part in memory.spans.host_tokens.parts.values())


@pytest.mark.parametrize("options", [{"forms": "int8"}, {"forms": "factored"}], ids=["tokens", "factors"])
def test_layers_leave_the_device_for_the_host(base: Any, pretended_cuda: Any, options: dict[str, Any]) -> None:
    options = {"router": "untrained"} | options
    there = {"offload": "progressive", "method_options": options, "kv_dtype": "float16", **REAL}
    probe = base.with_method("sekv", 0.5, config=semkv.CompileConfig(floor=0, **there, device_memory="1TB"), **options)
    demand = offload_demand(probe.program, probe.placement.plan, None, probe.placement.budget, probe.settings)
    settings = semkv.CompileConfig(floor=0, **there, device_memory=int(demand.device_bytes(PROMPT, 0)))
    moved_there = _moved(base, pretended_cuda, "sekv", 0.5, settings)
    ids = torch.randint(1, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    state = moved_there.prefill(pretended_cuda.mark(ids.clone()))
    where = []
    for new in (1, 2 * PROMPT // 3):
        where.append([_waits_on_device(memory) for memory in state.rows[0].memories()])
        moved_there.extend(state, pretended_cuda.mark(ids[:, :new].clone()))
    where.append([_waits_on_device(memory) for memory in state.rows[0].memories()])
    assert where[:2] == [[True, True], [True, False]]
    assert state.logits.is_cuda


def _waits_on_device(memory: Any) -> bool:
    """Whether what is folded is on the device, all of it or nothing."""
    parts = [*memory.spans.host_tokens.parts.values(), memory.spans.host_factors.numbers]
    places = {part.data.is_cuda for part in parts if part.length}
    assert len(places) == 1
    return places.pop()
