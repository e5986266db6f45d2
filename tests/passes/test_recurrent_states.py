"""Recurrent sites in lowered programs: whole bodies where many tokens run, the graph for one token where one does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from semkv.compiler.pipeline import captured_program, lower
from semkv.errors import CaptureError, SpecError
from semkv.ir import memory, spec
from semkv.ir.plain_memory import PlainMemory
from semkv.ir.recurrence import Pieces, RecurrentSite, distinct_pieces, held_pieces, recur, recurrent_nodes
from semkv.passes.base import PassOptions
from tests.hybrids import Alone, difference, hybrid, ids


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return hybrid("Lfm2")


@pytest.fixture(scope="module")
def found(model):
    return captured_program(model)


@pytest.fixture(scope="module")
def lowered(found):
    return lower(found, PassOptions(method="full"))


def calls(module, function) -> list[object]:
    return [node.args[1] for node in module.graph.nodes if node.target is function]


def test_each_site_is_one_node_of_the_body(found):
    assert [site.name for site in found.recurrences] == ["model.layers.0.conv", "model.layers.2.conv"]
    assert calls(found.body, recur) == [0, 1]
    assert not any(node.target == torch.ops.aten.conv1d.default for node in found.body.graph.nodes)
    assert len(distinct_pieces([found.body])) == 1


def test_a_model_of_recurrences_alone_has_nothing_to_compress():
    with pytest.raises(
        CaptureError, match=r"no attention found beside 1 modules with recurrent states: .* nothing to compress"
    ):
        captured_program(hybrid("Mamba2"))


def test_many_tokens_run_the_bodies_and_one_runs_plain_operators(lowered):
    for module in (lowered.prefill, lowered.extend):
        assert calls(module, memory.advance) == [0, 1]
        assert not calls(module, memory.read_states)
    decode = lowered.decode
    assert calls(decode, memory.read_states) == calls(decode, memory.write_states) == [0, 1]
    assert not calls(decode, memory.advance)
    assert not held_pieces(decode)
    assert sum(node.target == torch.ops.aten.convolution.default for node in decode.graph.nodes) == 2
    assert not recurrent_nodes(lowered.prefill.graph)


def test_the_programs_are_the_model_with_its_cache(model, lowered):
    held, alone = PlainMemory(lowered.sites), Alone(model)
    start = 0
    for length, name in ((19, "prefill"), (1, "decode"), (7, "extend"), (1, "decode"), (1, "decode")):
        text = ids(length, length)
        places = torch.arange(start, start + length)[None]
        with torch.no_grad():
            hidden = getattr(lowered, name)(text, places, held)
        assert difference(lowered.head(hidden), alone.read(text)) < 1e-5
        start += length


def test_a_model_without_states_has_none(decoder_program):
    assert decoder_program.recurrences == ()
    assert not recurrent_nodes(decoder_program.body.graph)


@pytest.mark.parametrize("label", ["prefill", "decode"])
def test_the_spec_wants_each_site_once(lowered, label):
    site = RecurrentSite(2, "model.layers.9.conv", lowered.recurrences[0].states)
    with pytest.raises(SpecError, match=rf"{label}: \w+ is called for recurrent sites \[0, 1\], expected \[0, 1, 2\]"):
        spec.check(lowered.evolve(recurrences=(*lowered.recurrences, site)))


def test_the_spec_wants_sites_without_states_called_as_they_are(lowered):
    site = RecurrentSite(2, "model.layers.9.experts", ())
    with pytest.raises(SpecError, match=r"decode: recur is called for recurrent sites \[\], expected \[2\]"):
        spec.check(lowered.evolve(recurrences=(*lowered.recurrences, site)))


def test_bodies_move_by_a_function_of_their_graphs(found):
    (pieces,) = distinct_pieces([found.body])
    seen: list[object] = []

    def note(graph):
        seen.append(graph)
        return graph

    moved = pieces.mapped(note)
    assert isinstance(moved, Pieces)
    assert seen == list(pieces.modules_by_name().values())
    assert (moved.states, moved.outputs) == (pieces.states, pieces.outputs)


def test_rows_of_several_tokens_run_one_by_one(found):
    (pieces,) = distinct_pieces([found.body])
    (node, _) = recurrent_nodes(found.body.graph)
    weights = [found.body.get_parameter(str(weight.target)) for weight in node.args[3]]
    text: list[Tensor] = [torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        (together,), states = pieces(text, None, weights)
        (alone,), own = pieces([text[0][1:2]], None, weights)
    assert difference(together[1:2], alone) < 1e-5
    assert difference(states[0][1:2], own[0]) < 1e-5
