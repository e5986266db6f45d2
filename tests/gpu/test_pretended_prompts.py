"""What is kept of a prompt is computed where the prompt was: on a pretended CUDA device, with the memory that the CPU makes."""

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
from semkv.runtime.snapshot import row_to_tensors
from tests.conftest import quick_ones
from tests.methods.test_step_graphs import CASES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is there needs no pretence")

ON_HOST = ("sekv, factors",)
"""Decompositions of spans are the host's; captures of retrieval heads are not pretended."""
HERE = {
    case: given for case, given in CASES.items() if given[0] not in ("specontext", "full") and case != "mixed, all"
} | {
    "sekv, factors": ("sekv", 0.3, {"router": "untrained", "forms": "factored"}),
    "semantic clusters": ("semanticache", 0.3, {}),
}
QUICK = ("h2o", "cake", "shadowkv", "infllm", "clusterkv", "sketch", "sekv, pooled", "sentencekv", "heterocache")
PROMPT = 330


@pytest.fixture(scope="module")
def base() -> CompiledModel:
    model, _ = bundled.load()
    return compile_model(model, bundled.profile(), method="full", config=CompileConfig(floor=0, kv_dtype="float16"))


@pytest.mark.parametrize("case", quick_ones(HERE, QUICK))
def test_a_prompt_is_compressed_where_it_was_read(base: CompiledModel, pretended_cuda: Any, case: str) -> None:
    method, budget, options = HERE[case]
    config = CompileConfig(floor=0, kv_dtype="float16", kernels="torch", cuda_graphs=False, method_options=options)
    here = base.with_method(method, budget, config=config, **options)
    source = moved(base._source, "cuda")
    for module in (source.body, source.head):
        pretended_cuda.move(module)
    there = CompiledModel(source, base.profile, find_method(method, options), budget, config)
    for module in (there.program.prefill, there.program.extend, there.program.decode):
        pretended_cuda.move(module)
    ids = torch.randint(3, 600, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    record = here.prefill_record(ids)
    wanted = row_to_tensors(here.compress(record).rows[0])[1]
    site = there.program.stores[0]
    there.compress(record)  # what a method computes once, of its profile
    pretended_cuda.least = PROMPT // 2 * site.key_dim  # half of a head's keys
    found = there.compress(record).rows[0]
    pretended_cuda.least = None
    if case not in ON_HOST:
        assert not [what for what in pretended_cuda.computed if not what.startswith("linalg_eigvalsh")]
    got: dict[str, Tensor] = row_to_tensors(found)[1]
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        torch.testing.assert_close(x.cpu(), wanted[name], rtol=0, atol=0, msg=name)
    for memory in found.memories():
        assert memory.spans is None or not any(x.is_cuda for x in memory.spans.device_tensors()), "they are mirrored"
