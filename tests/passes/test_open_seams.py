"""Calls that ask the memory what a prompt brings: where they stand, and that text alone is what it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from semkv.errors import SpecError
from semkv.ir import memory, spec
from semkv.ir.plain_memory import PlainMemory
from semkv.ir.program import Program
from semkv.ir.seams import Seams
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.find_seams import FindSeams
from semkv.passes.open_seams import OpenSeams
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead
from tests.conftest import Decoder, found_program
from tests.passes.test_find_seams import Axes

IDS = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(0))
PLACES = torch.arange(9)[None]


def opened(module: Decoder, *, more: bool = False) -> tuple[Program, Program]:
    """The lowered program, and with its seams open."""
    program = replace(found_program(module.double(), vocab_size=61), seams=Seams(reads_more=more))
    for step in (SurprisalHead(), FindSeams(), AssignBudgets(), RewriteAttention()):
        program = step.run(program, PassOptions())
    assert OpenSeams().applies(program, PassOptions())
    return program, OpenSeams().run(program, PassOptions())


def count(module, target) -> int:
    return sum(node.target == target for node in module.graph.nodes)


class Brings(PlainMemory):
    """A memory of a prompt that brings embeddings, features before two layers, and positions of three axes."""

    def __init__(self, sites, embeds: Tensor, entering: dict[int, Tensor], rotary: Tensor | None = None) -> None:
        super().__init__(sites)
        self.embeds, self.features, self.turned = embeds, entering, rotary

    def embedded(self, x: Tensor) -> Tensor:
        return self.embeds

    def entering(self, site: int, x: Tensor) -> Tensor:
        return x + self.features[site]

    def rotary(self, positions: Tensor, axes: int) -> Tensor:
        return super().rotary(positions, axes) if self.turned is None else self.turned


def test_operator_counts_and_text_as_it_was() -> None:
    before, after = opened(Decoder(), more=True)
    for module in (after.prefill, after.extend):
        assert count(module, memory.embedded) == 1
        assert [n.args[1] for n in module.graph.nodes if n.target == memory.entering] == [1, 2]
        assert count(module, memory.rotary) == 0
    assert after.decode is before.decode, "a step of a model whose positions are places asks for nothing"
    with pytest.raises(SpecError, match="decode: asks what a token is besides its id"):
        spec.check(replace(after, decode=after.extend))
    for text in (Decoder(), Axes("expanded")):
        before, after = opened(text)
        assert count(after.prefill, memory.entering) == 0
        plain, asked = (p.prefill(IDS, PLACES, PlainMemory(p.sites)) for p in (before, after))
        assert torch.equal(plain, asked)
    assert count(after.decode, memory.rotary) == count(after.prefill, memory.rotary) == 1


@torch.no_grad()
def test_what_is_brought_takes_its_place() -> None:
    module = Decoder()
    _, program = opened(module, more=True)
    embeds, *features = torch.randn(3, 1, 9, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = embeds
    for number, layer in enumerate(module.layers):
        x = layer(x + (features[number - 1] if number else 0), PLACES)
    hidden = program.prefill(IDS, PLACES, Brings(program.sites, embeds, dict(enumerate(features, 1))))
    assert torch.allclose(program.head(hidden), module.lm_head(module.norm(x)))


@pytest.mark.parametrize("made", ["expanded", "sliced"])
@torch.no_grad()
def test_positions_of_several_axes_are_the_memorys(made: str) -> None:
    module = Axes(made)
    _, program = opened(module)
    several = torch.randint(0, 9, (3, 1, 9), generator=torch.Generator().manual_seed(2))
    embeds = module.embed(IDS)
    own = Brings(program.sites, embeds, {}, several)
    x = embeds + (several.to(embeds.dtype) * torch.arange(1, 4)[:, None, None]).sum(0)[..., None].sin()
    for layer in module.layers:
        x = layer(x, PLACES)
    assert torch.allclose(program.head(program.prefill(IDS, PLACES, own)), module.lm_head(module.norm(x)))
