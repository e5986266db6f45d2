"""Kernels are bound to the attention of steps: arguments are written, and only those, and programs stay the same to states."""

from __future__ import annotations

import pytest

from semkv.artifact.fingerprint import program_fingerprint
from semkv.compiler.pipeline import lower, place
from semkv.ir.ops import mixed_attention
from semkv.passes.base import PassOptions
from semkv.passes.bind_kernels import BindKernels
from semkv.passes.surprisal_head import SurprisalHead


@pytest.fixture
def program(decoder_program):
    return lower(SurprisalHead().run(decoder_program, PassOptions()), PassOptions())


def said(module) -> list[dict]:
    calls = [node for node in module.graph.nodes if node.target == mixed_attention]
    return [{name: node.kwargs[name] for name in ("kernel", "layout") if name in node.kwargs} for node in calls]


def test_calls_of_steps_say_the_kernel_and_the_layout(program):
    layouts = ((64, 4, 3, 0, 0), (), (32, 4, 2, 0, 0))
    bound = place(program, PassOptions(kernels="triton", layouts=layouts))
    wanted = [
        {"kernel": "triton", "layout": [64, 4, 3, 0, 0]},
        {"kernel": "triton"},
        {"kernel": "triton", "layout": [32, 4, 2, 0, 0]},
    ]
    assert said(bound.decode) == said(bound.extend) == wanted
    assert bound.notes[-1] == "bind_kernels: kernels 'triton' at 3 sites, 2 with a tuned layout"
    assert said(program.decode) == [{}, {}, {}], "the program that was given must not change"


def test_nothing_else_changes(program):
    bound = place(program, PassOptions(kernels="torch"))
    assert bound.prefill is program.prefill
    before, after = ([(node.op, str(node.target)) for node in p.decode.graph.nodes] for p in (program, bound))
    assert before == after
    assert program_fingerprint(bound) == program_fingerprint(program)


def test_defaults_are_left_unsaid(program):
    assert not BindKernels().applies(program, PassOptions())
    bound = place(program, PassOptions(kernels="torch", layouts=((64, 4, 3, 0, 0),) * 3))
    again = place(bound, PassOptions())
    assert said(again.decode) == [{}, {}, {}], "what was bound for another device goes"
