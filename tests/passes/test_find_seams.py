"""Where a prompt may bring more than ids: found by data flow, in graphs that nobody wrote for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from semkv.ir.program import Program
from semkv.ir.seams import EMBEDDINGS, Seams
from semkv.passes.base import PassOptions
from semkv.passes.find_seams import FindSeams
from semkv.passes.surprisal_head import SurprisalHead
from tests.conftest import Decoder, found_program

VOCAB = 61


class Axes(Decoder):
    """Its last layer turns by a mean of three views of the positions, as rotary positions of three axes would be used."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.made = made

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        several = positions[None].expand(4 if self.made == "sliced" else 3, -1, -1)
        several = several[1:] if self.made == "sliced" else several
        x = x + (several.to(x.dtype) * torch.arange(1, 4, device=x.device)[:, None, None]).sum(0)[..., None].sin()
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


class Twice(Decoder):
    """It reads its ids in a second place."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x + input_ids[..., None].to(x.dtype).cos()))


def found(module: nn.Module, *, more: bool = False) -> Program:
    program = found_program(module.double(), vocab_size=VOCAB)
    program = SurprisalHead().run(program, PassOptions())
    return FindSeams().run(replace(program, seams=Seams(reads_more=more)), PassOptions())


def node_of(program: Program, name: str):
    (node,) = [node for node in program.body.graph.nodes if node.name == name]
    return node


def test_the_embedding_and_the_hidden_states_between_layers() -> None:
    program = found(Decoder(), more=True)
    seams = program.seams
    assert node_of(program, seams.embeddings).target == torch.ops.aten.embedding.default
    assert (seams.rotary, seams.axes, seams.reason) == ("", 1, "")
    assert [site for site, _ in seams.streams] == [0, 1, 2]
    assert [node_of(program, name).target for _, name in seams.streams[1:]] == [torch.ops.aten.add.Tensor] * 2
    assert found(Decoder()).seams.streams == ()  # a model of text alone
    assert "features may enter 3 layers" in program.notes[-1]


@pytest.mark.parametrize("made", ["expanded", "sliced"])
def test_rotary_positions_of_several_axes(made: str) -> None:
    program = found(Axes(made))
    assert program.seams.axes == 3
    assert node_of(program, program.seams.rotary).meta["val"].shape[0] == 3


def test_a_mark_of_the_capture_goes_before() -> None:
    program = SurprisalHead().run(found_program(Decoder().double(), vocab_size=VOCAB), PassOptions())
    embedding = next(n for n in program.body.graph.nodes if n.target == torch.ops.aten.embedding.default)
    with program.body.graph.inserting_after(embedding):
        scaled = program.body.graph.call_function(torch.ops.aten.mul.Tensor, (embedding, 3.0))
    embedding.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    scaled.meta[EMBEDDINGS] = True
    assert FindSeams().run(program, PassOptions()).seams.embeddings == scaled.name


def test_ids_that_are_read_twice_have_no_embedding_in_their_place() -> None:
    seams = found(Twice()).seams
    assert seams.embeddings == ""
    assert "reads its ids in several places" in seams.reason
