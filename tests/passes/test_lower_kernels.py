"""Constants computed once, decode fixed at one token, the same numbers."""

from __future__ import annotations

import pytest
import torch

from semkv.ir import spec
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.lower_kernels import LowerKernels
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead

aten = torch.ops.aten


@pytest.fixture(scope="module")
def before(decoder_program):
    program = decoder_program
    for step in (SurprisalHead(), AssignBudgets(), RewriteAttention()):
        program = step.run(program, PassOptions())
    return program


@pytest.fixture(scope="module")
def after(before):
    return LowerKernels().run(before, PassOptions())


def count(module, target) -> int:
    return sum(node.target == target for node in module.graph.nodes)


def lengths(module) -> int:
    return sum(node.target == aten.sym_size.int and node.args[1] == 1 for node in module.graph.nodes)


def test_operator_counts(before, after):
    spec.check(after)
    for label in ("prefill", "extend", "decode"):
        assert count(getattr(before, label), aten.arange.default) > 0
        assert count(getattr(after, label), aten.arange.default) == 0
        assert count(getattr(after, label), aten.pow.Scalar) == 0
    assert lengths(before.decode) > 0
    assert lengths(after.decode) == 0
    assert lengths(after.prefill) == lengths(before.prefill)
    assert lengths(after.extend) == lengths(before.extend)


def test_numbers_are_the_same(before, after):
    ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(2, 12).contiguous()
    results = []
    for program in (before, after):
        memory = PlainMemory(program.sites)
        with torch.no_grad():
            hidden = [program.prefill(ids[:, :6], positions[:, :6], memory)]
            hidden.append(program.extend(ids[:, 6:9], positions[:, 6:9], memory))
            hidden += [program.decode(ids[:, t : t + 1], positions[:, t : t + 1], memory) for t in range(9, 12)]
        results.append(torch.cat(hidden, 1))
    assert torch.equal(*results)


def test_parameters_are_never_folded(before, after):
    for label in ("prefill", "extend", "decode"):
        own = {parameter.data_ptr() for parameter in getattr(before, label).parameters()}
        assert {parameter.data_ptr() for parameter in getattr(after, label).parameters()} == own


def test_graphs_share_their_constants(after):
    stored = [dict(getattr(after, label).named_buffers()) for label in ("prefill", "extend", "decode")]
    common = set(stored[0]) & set(stored[2])
    assert common
    assert all(stored[0][name].data_ptr() == stored[2][name].data_ptr() for name in common)


def test_large_constants_stay_computed(before, monkeypatch):
    monkeypatch.setattr(LowerKernels, "FOLD_BYTES", 4)
    result = LowerKernels().run(before, PassOptions())
    assert "lower_kernels: 0 constants folded" in result.notes[-1]
    assert count(result.decode, aten.arange.default) == count(before.decode, aten.arange.default)


def test_random_and_uninitialised_values_are_never_folded(make_found):
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(13, 8), torch.nn.Linear(8, 13)

        def forward(self, input_ids, positions):
            return self.lm_head(self.embed(input_ids) + torch.rand(8) * 0 + torch.empty(8) * 0)

    program = make_found(Noisy(), vocab_size=13)
    for step in (SurprisalHead(), AssignBudgets(), RewriteAttention(), LowerKernels()):
        program = step.run(program, PassOptions())
    assert "lower_kernels: 0 constants folded" in program.notes[-1]


def test_input_is_not_changed(before):
    text = str(before.decode.graph)
    LowerKernels().run(before, PassOptions())
    assert str(before.decode.graph) == text
