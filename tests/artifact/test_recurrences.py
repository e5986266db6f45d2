"""Bodies of recurrent sites as files: what is stored is read again, and what does not fit is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from semkv.artifact.fingerprint import program_fingerprint
from semkv.artifact.graph_json import graph_from_json, graph_to_json
from semkv.artifact.load import load_program
from semkv.artifact.recurrences import BodyFacts, bodies_from, bodies_of, body_graphs, body_values
from semkv.artifact.save import save_program
from semkv.compiler.pipeline import captured_program, lower
from semkv.errors import ArtifactError
from semkv.passes.base import PassOptions
from tests.hybrids import hybrid, ids


@pytest.fixture(scope="module")
def program():
    return lower(captured_program(hybrid("Lfm2")), PassOptions(method="full"))


@pytest.fixture(scope="module")
def folder(program, tmp_path_factory):
    return save_program(program, tmp_path_factory.mktemp("artifact") / "model", method="full")


def test_a_program_comes_back_as_it_was(program, folder):
    loaded, _ = load_program(folder)
    assert loaded.recurrences == program.recurrences
    assert program_fingerprint(loaded) == program_fingerprint(program)
    places = torch.arange(23)[None]
    with torch.no_grad():
        assert torch.equal(loaded.body(ids(23, 1), places), program.body(ids(23, 1), places))
    names = {path.name for path in (folder / "programs").iterdir()}
    assert {"recurrence_0_1.json", "recurrence_0_256.json"} <= names
    assert "recurrence_1_1.json" not in names  # both layers have one body


def test_another_body_is_another_program(program):
    other = copy.copy(program)
    (body,) = bodies_of(program)
    shorter = body.mapped(lambda graph: graph)
    del shorter.graphs[256]
    module = copy.copy(program.body)
    for name in [name for name, value in program.body.named_children() if value is body]:
        setattr(module, name, shorter)
    other = program.evolve(body=module)
    assert program_fingerprint(other) != program_fingerprint(program)


def parts(program):
    bodies = bodies_of(program)
    return [BodyFacts.model_validate(one) for one in body_values(bodies)], body_graphs(bodies)


def test_bodies_without_a_graph_for_one_token_are_refused(program):
    facts, graphs = parts(program)
    del graphs["recurrence_0_1"]
    with pytest.raises(ArtifactError, match=r"recurrence 0 has graphs for \[2, 3, 4, 16, 64, 256\] tokens"):
        bodies_from(facts, graphs, "model")


def test_graphs_of_a_body_that_there_is_not_are_refused(program):
    facts, graphs = parts(program)
    graphs["recurrence_7_1"] = graphs["recurrence_0_1"]
    with pytest.raises(ArtifactError, match="'recurrence_7_1' belongs to none of 1 bodies"):
        bodies_from(facts, graphs, "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value["recurrences"].update(recurrence_0=4), "is recurrence 4 of 1"),
        (lambda value: value["recurrences"].update({"a.b": 0}), "expected a Python identifier"),
        (lambda value: value.pop("recurrences"), "which is not among the graph's tensors"),
        (lambda value: call(value)["args"].__setitem__(2, [3]), "expected nodes, the site as a number"),
        (lambda value: call(value)["args"].__setitem__(1, "0"), "expected nodes, the site as a number"),
        (lambda value: call(value)["args"].pop(), "expected 4 and none"),
    ],
)
def test_edited_graphs_are_refused(program, change, message):
    bodies = bodies_of(program)
    value = json.loads(json.dumps(graph_to_json(program.body)))
    change(value)
    tensors = dict(program.body.state_dict(keep_vars=True))
    with pytest.raises(ArtifactError, match=message):
        graph_from_json(value, tensors, bodies=bodies)


def call(value):
    return next(node for node in value["nodes"] if node.get("target") == "semkv.recurrence")
