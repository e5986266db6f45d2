"""Projections of a step by the operator that reads weights fast: the same numbers, the user's own weights."""

from __future__ import annotations

import torch

from semkv.ir import spec
from semkv.ir.graph import attribute
from semkv.ir.ops import linear
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.lower_kernels import LowerKernels
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.stream_weights import StreamWeights
from semkv.passes.surprisal_head import SurprisalHead

aten = torch.ops.aten


def lowered(program):
    for step in (SurprisalHead(), AssignBudgets(), RewriteAttention(), LowerKernels()):
        program = step.run(program, PassOptions())
    return program, StreamWeights().run(program, PassOptions())


def projections(module, target) -> list:
    return [node for node in module.graph.nodes if node.target == target]


def test_decode_and_head_read_their_weights_by_it(decoder_program):
    before, after = lowered(decoder_program)
    spec.check(after)
    for label in ("decode", "head"):
        old, new = getattr(before, label), getattr(after, label)
        assert len(projections(new, linear)) == len(projections(old, aten.linear.default)) > 0
        assert not projections(new, aten.linear.default)
        for one, other in zip(projections(old, aten.linear.default), projections(new, linear)):
            assert attribute(old, one.args[1].target) is attribute(new, other.args[1].target)
    assert after.extend is before.extend
    assert after.prefill is before.prefill


def test_a_step_gives_the_same_numbers(decoder_program):
    before, after = lowered(decoder_program)
    ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(7).expand(2, 7).contiguous()
    logits = []
    for program in (before, after):
        memory = PlainMemory(program.sites)
        with torch.no_grad():
            program.prefill(ids[:, :6], positions[:, :6], memory)
            logits.append(program.head(program.decode(ids[:, 6:], positions[:, 6:], memory)))
    torch.testing.assert_close(*logits)
