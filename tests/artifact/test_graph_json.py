"""Graphs to JSON and back: same results, same structure, and nothing that the schema does not name."""

from __future__ import annotations

import copy
import json
import math
import operator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from semkv.artifact.graph_json import graph_from_json, graph_tensors, graph_to_json
from semkv.artifact.schema import graph_json_schema
from semkv.errors import ArtifactError
from semkv.ir.plain_memory import PlainMemory


class Small(nn.Module):
    """Uses a tied matrix, a mask made inside, an infinite fill, a cast and sizes computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 11, bias=False)])
        self.mix[1].weight = self.embed.weight
        self.register_buffer("table", torch.arange(64, dtype=torch.float32).reshape(8, 8).t())

    def forward(self, input_ids, positions):
        x = self.embed(input_ids)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (x @ self.table @ x.transpose(1, 2)).masked_fill(~mask, -math.inf)
        x = nn.functional.gelu(self.mix[0](scores.double().softmax(-1).float() @ x), approximate="tanh")
        x = torch.cat(x.chunk(2, dim=-1), -1)[..., :8]
        return self.mix[1](x.reshape(-1, 8)).view(input_ids.shape[0], length, 11) + positions[..., None] * 0.5


def exported(model: nn.Module) -> GraphModule:
    ids = torch.randint(0, 11, (2, 7))
    sizes = {0: torch.export.Dim("rows", min=1, max=8), 1: torch.export.Dim("tokens", min=2, max=64)}
    positions = torch.arange(7).expand(2, 7).contiguous()
    program = torch.export.export(model.eval(), (ids, positions), dynamic_shapes=(sizes, sizes))
    return program.module(check_guards=False)


def wire(value: object) -> object:
    """Through text, as a file would."""
    return json.loads(json.dumps(value, allow_nan=False))


def test_exported_graph_round_trips_with_dynamic_sizes():
    model = Small()
    graph = exported(model)
    value = wire(graph_to_json(graph))
    loaded = graph_from_json(value, graph_tensors(graph))
    for rows, tokens in ((1, 2), (3, 33), (8, 64)):
        ids = torch.randint(0, 11, (rows, tokens))
        positions = torch.arange(tokens).expand(rows, tokens).contiguous()
        torch.testing.assert_close(loaded(ids, positions), model(ids, positions), rtol=0, atol=0)
    assert graph_to_json(loaded, meta=False) == graph_to_json(graph, meta=False)


def test_shapes_and_dtypes_are_kept_for_readers():
    nodes = {node["name"]: node for node in graph_to_json(exported(Small()))["nodes"]}
    assert nodes["input_ids"]["dtype"] == "int64"
    assert all(isinstance(size, str) for size in nodes["input_ids"]["shape"])
    assert nodes["embedding"]["shape"][2] == 8


def test_devices_are_those_of_the_load():
    value = graph_to_json(exported(Small()))
    (ones,) = (node for node in value["nodes"] if node.get("target") == "aten::ones.default")
    assert ones["kwargs"]["device"] == {"device": "model"}
    loaded = graph_from_json(value, graph_tensors(exported(Small())), device="meta")
    (call,) = (node for node in loaded.graph.nodes if node.target is torch.ops.aten.ones.default)
    assert call.kwargs["device"] == torch.device("meta")


def test_memory_functions_round_trip(program):
    for name in ("prefill", "extend", "decode"):
        module = getattr(program, name)
        loaded = graph_from_json(wire(graph_to_json(module)), graph_tensors(module))
        ids = torch.randint(0, program.vocab_size, (1, 9))
        positions = torch.arange(9)[None]
        expected = module(ids, positions, PlainMemory(program.sites))
        assert torch.equal(loaded(ids, positions, PlainMemory(program.sites)), expected)
        assert [node.target for node in loaded.graph.nodes] == [node.target for node in module.graph.nodes]


@pytest.mark.parametrize(
    "argument",
    [
        None,
        True,
        3,
        -1,
        2**62,
        0.1,
        1.0,
        -0.0,
        math.inf,
        -math.inf,
        "tanh",
        torch.float16,
        torch.bool,
        torch.strided,
        torch.contiguous_format,
        [1, [2.5]],
        (1, (2,), None),
        slice(1, None, 2),
        {"a": [1]},
        torch.device("cpu"),
    ],
)
def test_every_kind_of_argument_round_trips(argument):
    from semkv.artifact.arguments import decode, encode
    from semkv.artifact.schema import GraphJson

    node = {"name": "out", "op": "output", "args": [encode(argument, torch.device("cpu"))]}
    parsed = GraphJson.model_validate(wire({"schema": 1, "nodes": [node]}))
    found = decode(parsed.nodes[0].args[0], {}, torch.device("cpu"))
    assert found == argument
    assert type(found) is type(argument)
    assert repr(found) == repr(argument)


def test_nan_round_trips():
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.full_like.default, (x, math.nan)))
    loaded = graph_from_json(wire(graph_to_json(GraphModule({}, graph))), {})
    assert loaded(torch.ones(2)).isnan().all()


def foreign(target, argument: object = None) -> GraphModule:
    """A graph that calls `target`; arguments that code cannot hold are put in afterwards."""
    graph = Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    graph.output(node)
    module = GraphModule({}, graph)
    node.target = target
    if argument is not None:
        node.args = (*node.args, argument)
    return module


@pytest.mark.parametrize("target", [print, torch.relu, eval, operator.setitem, torch.ops.aten._pin_memory.default])
def test_calls_outside_the_list_are_refused_when_saving(target):
    with pytest.raises(ArtifactError, match=r"node '\w+': .*(an artifact can hold calls of|may not be in an artifact)"):
        graph_to_json(foreign(target))


def test_submodules_and_symbolic_leftovers_are_refused_when_saving():
    graph = Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    root = nn.Module()
    root.inner = nn.Linear(2, 2)
    with pytest.raises(ArtifactError, match="call_module of 'inner'; an artifact holds operators only"):
        graph_to_json(GraphModule(root, graph))
    with pytest.raises(ArtifactError, match=r"is an? object, which an artifact cannot hold"):
        graph_to_json(foreign(torch.ops.aten.relu.default, object()))


def edit(value: dict, change) -> dict:
    value = copy.deepcopy(value)
    change(value)
    return value


def node_named(value: dict, name: str) -> dict:
    return next(node for node in value["nodes"] if node["name"] == name)


EDITS = {
    "another schema version": (lambda v: v.update(schema=2), "schema"),
    "an unknown field": (lambda v: v["nodes"][0].update(code="1"), "code"),
    "a name that is code": (lambda v: v["nodes"][2].update(name="x=print(1)"), "expected a Python identifier"),
    "a keyword": (lambda v: v["nodes"][2].update(name="lambda"), "expected a Python identifier"),
    "a name twice": (lambda v: v["nodes"][3].update(name=v["nodes"][2]["name"]), "name is taken"),
    "an input that is code": (
        lambda v: node_named(v, "input_ids").update(target="x=1"),
        "expected a Python identifier",
    ),
    "an input twice": (lambda v: node_named(v, "input_ids").update(target="positions"), "a second placeholder"),
    "a reference forward": (
        lambda v: node_named(v, "embedding")["args"].__setitem__(1, {"node": "output"}),
        "not an earlier",
    ),
    "a file operator": (lambda v: node_named(v, "embedding").update(target="aten::from_file.default"), "may not be"),
    "an operator that is none": (
        lambda v: node_named(v, "embedding").update(target="aten::nothing.default"),
        "does not exist",
    ),
    "a class": (lambda v: node_named(v, "embedding").update(target="aten::__class__.default"), "does not exist"),
    "a function by import": (lambda v: node_named(v, "embedding").update(target="os.system"), "expected namespace::"),
    "another namespace": (
        lambda v: node_named(v, "embedding").update(target="inductor::x.default"),
        "expected namespace::",
    ),
    "an argument too many": (lambda v: node_named(v, "embedding").update(args=[1] * 9), "positional arguments"),
    "an argument missing": (lambda v: node_named(v, "embedding").update(args=[]), "'weight' is missing"),
    "an argument of another kind": (
        lambda v: node_named(v, "embedding")["args"].__setitem__(0, "x"),
        "expected Tensor",
    ),
    "an unknown keyword": (lambda v: node_named(v, "embedding").update(kwargs={"x": 1}), "'x' is not one of"),
    "an integer of 70 bits": (lambda v: node_named(v, "embedding")["args"].append(2**70), "less than"),
    "a tensor that is not there": (
        lambda v: v["tensors"].update({"embed.weight": "gone"}),
        "'gone' is not among the stored",
    ),
    "a path to a method": (lambda v: v["tensors"].update({"forward": "embed.weight"}), "not free at 'forward'"),
    "a path to a class": (lambda v: v["tensors"].update({"__class__": "embed.weight"}), "names of Python's own"),
    "a path that is code": (lambda v: v["tensors"].update({"a')+x": "embed.weight"}), "expected a dotted path"),
    "no output": (lambda v: v["nodes"].pop(), "expected one output node"),
    "a deep argument": (
        lambda v: node_named(v, "embedding")["args"].__setitem__(0, [[[[[[[[[1]]]]]]]]]),
        "nested deeper",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_graphs_are_refused(name):
    graph = exported(Small())
    change, text = EDITS[name]
    value = edit(wire(graph_to_json(graph)), change)
    with pytest.raises(ArtifactError, match=text):
        graph_from_json(value, graph_tensors(graph))


def test_functions_take_numbers_and_nodes_only():
    graph = Graph()
    x = graph.placeholder("x")
    size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
    graph.output(graph.call_function(operator.mul, (size, 2)))
    value = graph_to_json(GraphModule({}, graph))
    assert graph_from_json(value, {})(torch.ones(3)) == 6
    for wrong in ([1, [0]], ["a", 2], [{"node": value["nodes"][1]["name"]}]):
        with pytest.raises(ArtifactError, match="expected"):
            graph_from_json(edit(value, lambda v, wrong=wrong: v["nodes"][2].update(args=wrong)), {})
    with pytest.raises(ArtifactError, match="exponent of at most 16"):
        graph_from_json(edit(value, lambda v: v["nodes"][2].update(target="operator.pow", args=[10, 10**9])), {})


def test_published_json_schema_is_the_one_that_loading_uses():
    """Titles differ between versions of pydantic; kinds, fields and bounds must not."""
    published = json.loads((Path(__file__).parents[2] / "docs" / "graph.schema.json").read_text())
    current = wire(graph_json_schema())
    assert published["properties"].keys() == current["properties"].keys()
    assert published["$defs"].keys() == current["$defs"].keys()
    for name, found in published["$defs"].items():
        expected = current["$defs"][name]
        assert found.get("required") == expected.get("required"), name
        assert found.get("properties", {}).keys() == expected.get("properties", {}).keys(), name
    assert len(published["$defs"]["Argument"]["anyOf"]) == len(current["$defs"]["Argument"]["anyOf"])
