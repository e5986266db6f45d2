"""Steps never mix devices: the runtime runs on a pretended CUDA device, where PyTorch's refusals are imitated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import semkv
from semkv.capture.device import moved
from semkv.offload import offload_demand

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is there needs no pretence")

VOCAB, PROMPT, NEW = 61, 120, 12
REAL: dict[str, Any] = {"prefetch": False, "kernels": "torch", "cuda_graphs": False}
"""A GPU's streams, kernels and graphs cannot be pretended."""


@pytest.fixture(scope="module")
def base(llama: Any) -> Any:
    return semkv.compile(llama(VOCAB, 32, 4))


def _moved(base: Any, mode: Any, method: str, budget: float | None, settings: semkv.CompileConfig) -> Any:
    """`base` on the pretended GPU, under another method."""
    there = copy.copy(base)
    source = moved(base._source, "cuda")
    for module in (source.body, source.head):
        mode.move(module)  # parameters are made without the functions that the mode sees
    object.__setattr__(there, "_source", source)
    return there.with_method(method, budget, config=settings, **settings.method_options)


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


CASES = [
    ("full", None, {}),
    ("streaming_llm", 0.4, {}),
    ("snapkv", 0.4, {}),
    ("sekv", 0.5, {"router": "coarse"}),
    ("sekv", 0.5, {"router": "untrained", "forms": "factored", "routing": "mean"}),
]


@pytest.mark.parametrize(
    ("method", "budget", "options", "residency"),
    [
        pytest.param(method, budget, options, residency, id="-".join(map(str, (method, *options.values(), residency))))
        for method, budget, options in CASES
        for residency in (("shared", "elastic") if method == "sekv" else ("shared",))  # the others unfold nothing
    ],
)
def test_a_conversation_stays_on_its_device(
    base: Any, pretended_cuda: Any, method: str, budget: float | None, options: dict[str, Any], residency: str
) -> None:
    settings = semkv.CompileConfig(residency=residency, method_options=options, **REAL)
    ids = torch.randint(1, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    wanted = base.with_method(method, budget, config=settings, **options).generate(
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
        held: list[Tensor] = [memory.kept.k, memory.kept.v, memory.recent.k, memory.recent.v]
        assert all(tensor.is_cuda for tensor in held)
        assert memory.spans is None or not any(part.data.is_cuda for part in memory.spans.host_tokens.parts.values())


@pytest.mark.parametrize("options", [{"forms": "int8"}, {"forms": "factored"}], ids=["tokens", "factors"])
def test_layers_leave_the_device_for_the_host(base: Any, pretended_cuda: Any, options: dict[str, Any]) -> None:
    options = {"router": "untrained"} | options
    there = {"offload": "progressive", "method_options": options, "kv_dtype": "float16", **REAL}
    probe = base.with_method("sekv", 0.5, config=semkv.CompileConfig(**there, device_memory="1TB"), **options)
    demand = offload_demand(probe.program, probe.placement.plan, None, probe.placement.budget, probe.settings)
    settings = semkv.CompileConfig(**there, device_memory=int(demand.device_bytes(PROMPT, 0)))
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
    parts = [*memory.spans.host_tokens.parts.values(), *memory.spans.host_factors.packed.values()]
    places = {part.data.is_cuda for part in parts if part.length}
    assert len(places) == 1
    return places.pop()
