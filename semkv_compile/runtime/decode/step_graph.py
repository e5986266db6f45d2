"""Decode steps as graphs of tensors: each layer's part (`semkv.runtime.decode.layer_step`) is traced and put into the program.

A graph is for one row and one composition: which kinds of layers it has. Its inputs are the ids, the positions, the numbers of the
step and the tensors of the rows' memories, which it changes in place; sizes of those may grow from step to step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import RLock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.ir import memory
from semkv.ir.graph import attribute, copy_graph_module, placeholders
from semkv.ir.ops import mixed_attention
from semkv.ir.program import Program
from semkv.ir.recurrence import RecurrentSite
from semkv.kernels.segments import Behind
from semkv.runtime.decode.layer_step import NUMBERS, Layer, attend_step

aten = torch.ops.aten
TRACING = RLock()
"""Held while graphs are looked up and made: what traces patches functions of the process."""
ANEW = ("input_ids", "positions", "numbers", "turned")
"""Inputs that come anew with each step; all others are state."""
SITE = "semkv_site"
"""In a node's `meta`: the site whose turn it is of."""
Prepare = Callable[[GraphModule, frozenset[int]], Callable[..., tuple[Tensor, ...]]]
TERMS = ("sinks", "bias_slopes", "bias_table")
"""Arguments of `semkv::mixed_attention` that have one row per query head."""


@dataclass
class Turn:
    """What a row's part of one site brings to a step: numbers of `NUMBERS`, anew each time, state by name without a dimension of rows, and
    what is the same in every step. back: tensors, each with the one in its place in `tensors`, which the step writes to."""

    layer: Layer
    numbers: tuple[int, ...]
    tensors: dict[str, Tensor]
    constants: dict[str, Tensor]
    back: Sequence[tuple[Tensor, Tensor]] = ()

    @cached_property
    def behind(self) -> Behind:
        """State and constants."""
        return Behind([*self.tensors.values(), *self.constants.values()])


class Turns(list[list[Turn]]):
    """What a row brings to its steps, of each site its parts."""

    def put(self, site: int, part: int, turn: Turn) -> None:
        """Another turn, or a first one. The old one's tensors are let go of at once."""
        self.__dict__.clear()
        self[site][part : part + 1] = [turn]

    @cached_property
    def flat(self) -> list[Turn]:
        return [turn for parts in self for turn in parts]

    @cached_property
    def behind(self) -> Behind:
        """The state of all turns."""
        return Behind(x for turn in self.flat for x in turn.tensors.values())

    @cached_property
    def graphs(self) -> dict[tuple[int, ...], StepGraph]:
        """The graph of their step, by the sites whose queries it returns."""
        return {}


@dataclass(frozen=True)
class StepGraph:
    """run: (ids int64 [1, 1], positions int64 [1, 1], numbers int64 [turns, len(NUMBERS), 1]; behind: state of all turns, states
    [1, ...] of all recurrent sites, turned int64 [1, 1] where rotary positions have several axes) -> (hidden [1, 1, H],
    told int64 [reading turns, 1, 2], units read [1, H] of each of them, queries [1, Hq, 1, D] of each site of `asked`, hidden states
    [1, 1, H] that enter each site of `observed`)."""

    module: GraphModule
    observed: tuple[int, ...]
    run: Callable[..., tuple[Tensor, ...]]


class StepGraphs:
    """The graphs of a program's decode steps, made when a composition is met first.

    prepare: makes of a graph, and of the places of the inputs that come anew with each step, what runs it; it takes the state as
    `behind`. Raises `NotImplementedError` for a program whose steps ask for more than memory.
    """

    def __init__(self, program: Program, prepare: Prepare) -> None:
        assert program.decode is not None
        self.program, self.prepare = program, prepare
        self._graphs: dict[tuple[object, ...], StepGraph] = {}
        self._traces: dict[tuple[object, ...], GraphModule] = {}

    def of(self, turns: Turns, asked: tuple[int, ...]) -> StepGraph:
        """For the turns of a row; asked: sites whose queries are returned."""
        if asked not in turns.graphs:
            turns.graphs[asked] = self._of(turns, asked)
        return turns.graphs[asked]

    def _of(self, turns: Turns, asked: tuple[int, ...]) -> StepGraph:
        key = (asked, *(tuple(turn.layer.kind for turn in parts) for parts in turns))
        with TRACING:
            if key not in self._graphs:
                module, observed = self._spliced(turns, asked)
                names = list(placeholders(module.graph))
                anew = frozenset(place for place, name in enumerate(names) if name in ANEW)
                self._graphs[key] = StepGraph(module, observed, self.prepare(module, anew))
            return self._graphs[key]

    def reasons(self) -> list[str | None]:
        """Of each graph, what keeps it from being one call; None where nothing does, or where it is run node by node."""
        return [getattr(graph.run, "reason", None) for graph in self._graphs.values()]

    # -- splicing ------------------------------------------------------------------------------------------------------

    def _spliced(self, turns: Sequence[Sequence[Turn]], asked: tuple[int, ...]) -> tuple[GraphModule, tuple[int, ...]]:
        module = copy_graph_module(self.program.decode)
        graph, inputs = module.graph, placeholders(module.graph)
        with graph.inserting_after(inputs["memory"]):
            numbers = graph.placeholder("numbers")
        state = _Inputs(graph, numbers)
        places: dict[tuple[int, int], tuple[int, dict[str, Node]]] = {}
        for s, parts in enumerate(turns):
            for p, turn in enumerate(parts):
                places[s, p] = (len(places), state.of(turn, f"s{s}_p{p}"))
        told: list[Node] = []
        reads: list[Node] = []
        passed: dict[str, Node] = {}
        queries: dict[int, Node] = {}
        for node in [x for x in graph.nodes if x.target == memory.entries]:
            site = node.args[1]
            attends = next(user for user in _descendants_by_item(node) if user.target == mixed_attention)
            queries[site] = node.args[2]
            with graph.inserting_before(attends):
                outs = []
                for p, turn in enumerate(turns[site]):
                    number, own = places[site, p]
                    out, *more = self._inlined(module, attends, node.args[2:6], turn, number, numbers, own | passed)
                    outs.append(out)
                    if turn.layer.reads:
                        told.append(more.pop(0))
                        reads.append(more.pop(0))
                    passed |= dict(zip(turn.layer.passes, more))
                whole = outs[0] if len(outs) == 1 else graph.call_function(aten.cat.default, (outs, 1))
            attends.replace_all_uses_with(whole)
            graph.erase_node(attends)
            for item in list(node.users):
                graph.erase_node(item)
            graph.erase_node(node)
        self._place_states(graph, state)
        self._place_rotary(graph, inputs["positions"], state)
        observed: dict[int, Node] = {}
        for node in [x for x in graph.nodes if x.target == memory.observe]:
            observed[node.args[1]] = node.args[2]
            graph.erase_node(node)
        hidden = graph.output_node().args[0]
        while isinstance(hidden, (tuple, list)):
            (hidden,) = hidden
        with graph.inserting_before(graph.output_node()):
            more = [graph.call_function(aten.stack.default, (told,)), *reads] if told else []
        graph.output_node().args = ((hidden, *more, *(queries[site] for site in asked), *observed.values()),)
        graph.erase_node(inputs["memory"])
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()
        return module, tuple(observed)

    def _place_states(self, graph: Graph, state: _Inputs) -> None:
        """States of recurrent sites become inputs, behind all others, which the step writes in place."""
        for node in [x for x in graph.nodes if x.target == memory.read_states]:
            site = self.program.recurrences[node.args[1]]
            held = state.recurrent(site)
            for item in list(node.users):
                item.replace_all_uses_with(held[item.args[1]])
                graph.erase_node(item)
            (kept,) = [x for x in graph.nodes if x.target == memory.write_states and x.args[1] == site.index]
            with graph.inserting_before(kept):
                for old, new in zip(held, kept.args[2]):
                    graph.call_function(aten.copy_.default, (old, new))
            graph.erase_node(kept)
            graph.erase_node(node)

    def _place_rotary(self, graph: Graph, positions: Node, state: _Inputs) -> None:
        """Rotary positions of several axes are the token's place and what the last input says, int64 [1, 1]: by how much they are more."""
        asked = [x for x in graph.nodes if x.target == memory.rotary]
        turned = state.turned() if asked else None
        for node in asked:
            with graph.inserting_before(node):
                moved = graph.call_function(aten.add.Tensor, (positions, turned))
                moved = graph.call_function(aten.unsqueeze.default, (moved, 0))
                made = graph.call_function(aten.expand.default, (moved, [node.args[2], -1, -1]))
            node.replace_all_uses_with(made)
            graph.erase_node(node)

    def _inlined(
        self,
        module: GraphModule,
        attends: Node,
        site_inputs: Sequence[Node],
        turn: Turn,
        number: int,
        numbers: Node,
        own: dict[str, Node],
    ) -> list[Node]:
        """The nodes of one turn, before `attends`: its output, and what it tells."""
        graph, layer = module.graph, turn.layer
        site, whole = layer.site, self.program.sites[layer.site.index]
        q, k, v, positions = site_inputs
        heads, asking = (site.first_head, site.first_head + site.kv_heads), site.query_heads

        def part(x: Node, first: int, last: int, every: int) -> Node:
            return x if last - first == every else graph.call_function(aten.slice.Tensor, (x, 1, first, last))

        given = [
            part(q, asking.start, asking.stop, whole.q_heads),
            part(k, *heads, whole.kv_heads),
            part(v, *heads, whole.kv_heads),
            positions,
            graph.call_function(aten.select.int, (numbers, 0, number)),
        ]
        terms: dict[str, Node] = {}
        for name in TERMS:
            if name in attends.kwargs:
                node = attends.kwargs[name]
                assert isinstance(node, Node)
                if site.q_heads != whole.q_heads:
                    node = graph.call_function(aten.slice.Tensor, (node, 0, asking.start, asking.stop))
                terms[name] = node
        constants = {}
        for name, x in turn.constants.items():
            target = f"step_{name}_{site.index}_{site.first_head}".replace(".", "_")
            if not hasattr(module, target):
                module.register_buffer(target, x)
            constants[name] = graph.get_attr(target)
        values = {
            name: constants[name]
            if name in constants
            else graph.call_function(aten.unsqueeze.default, (own[name], 0))
            if name in turn.tensors
            else own[name]
            for name in layer.tensors
        }
        examples = {
            name: own[name].meta["semkv_example"]
            for name in layer.tensors
            if name not in turn.tensors and name not in constants
        }

        trace = self.trace(turn, {name: attribute_of(module, node) for name, node in terms.items()}, examples)
        order = [*given, *(values[name] for name in layer.tensors), *terms.values()]
        copies = dict(zip([x for x in trace.graph.nodes if x.op == "placeholder"], order, strict=True))
        for node in trace.graph.nodes:
            if node.op == "output":
                results = node.args[0]
                assert isinstance(results, (list, tuple))
                for x in results:
                    val = x.meta.get("val")
                    if isinstance(val, Tensor):
                        copies[x].meta["semkv_example"] = torch.zeros(val.shape, dtype=val.dtype, device="cpu")
                return [copies[x] for x in results]
            if node.op == "get_attr":
                target = f"step_{node.target}_{site.index}_{site.first_head}"
                if not hasattr(module, target):
                    here = attribute_of(trace, node).to(turn.tensors["recent.k"].device)
                    module.register_buffer(target, here)
                copies[node] = graph.get_attr(target)
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta[SITE] = site.index
        raise AssertionError("a trace without an output")

    def trace(self, turn: Turn, terms: dict[str, Tensor], passed: dict[str, Tensor]) -> GraphModule:
        """`attend_step` of one kind of layers, for one row: its inputs are q, k, v, positions, numbers, the layer's tensors and `terms`."""
        with TRACING:
            return self._traced(turn, terms, passed)

    def _traced(self, turn: Turn, terms: dict[str, Tensor], passed: dict[str, Tensor]) -> GraphModule:
        layer = turn.layer
        key = (layer.kind, tuple(terms))
        if key not in self._traces:
            site, names = layer.site, layer.tensors
            dtype = self.program.dtype
            shapes = [(site.q_heads, site.key_dim), (site.kv_heads, site.key_dim), (site.kv_heads, site.value_dim)]
            given = {name: x[None] for name, x in turn.tensors.items()} | turn.constants | passed
            with FakeTensorMode():  # of no device: what is traced says none
                example = [torch.zeros(1, heads, 1, dim, dtype=dtype, device="cpu") for heads, dim in shapes]
                example.append(torch.zeros(1, 1, dtype=torch.int64, device="cpu"))
                example.append(torch.zeros(len(NUMBERS), 1, dtype=torch.int64, device="cpu"))
                for x in (*(given[name] for name in names), *terms.values()):
                    example.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu"))

            def run(q, k, v, positions, numbers, *rest):
                held, own = rest[: len(names)], rest[len(names) :]
                out, told = attend_step(
                    layer, q, k, v, positions, numbers, dict(zip(names, held)), dict(zip(terms, own))
                )
                return (out, *told)

            with torch.no_grad():
                self._traces[key] = make_fx(run, tracing_mode="fake")(*example)
        return self._traces[key]


class _Inputs:
    """Placeholders of the state of turns, behind `numbers`; a tensor that several turns have is one of them."""

    def __init__(self, graph: Graph, last: Node) -> None:
        self.graph, self.last = graph, last

    def of(self, turn: Turn, name: str) -> dict[str, Node]:
        made = {}
        for key in turn.tensors:
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(f"{name}_{key}".replace(".", "_"))
            made[key] = self.last
        return made

    def recurrent(self, site: RecurrentSite) -> list[Node]:
        """The states of a recurrent site, [1, ...] each."""
        made = []
        for number in range(len(site.states)):
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(f"r{site.index}_{number}")
            made.append(self.last)
        return made

    def turned(self) -> Node:
        """What rotary positions lie above places."""
        with self.graph.inserting_after(self.last):
            self.last = self.graph.placeholder("turned")
        return self.last


def attribute_of(module: GraphModule, node: Node) -> Tensor:
    """The tensor of a term, for its size: by the metadata of the node, or of the attribute that it is."""
    if node.op == "get_attr":
        found = attribute(module, str(node.target))
        assert isinstance(found, Tensor)
        return found
    found = node.meta.get("val")
    if not isinstance(found, Tensor):
        base = attribute_of(module, node.all_input_nodes[0])
        assert callable(node.target)
        return node.target(base, *node.args[1:], **node.kwargs)
    return torch.zeros([int(size) for size in found.shape], dtype=found.dtype, device="cpu")


def _descendants_by_item(node: Node) -> list[Node]:
    """The users of what a call returns."""
    return [user for item in node.users if item.target == operator.getitem for user in item.users]


__all__ = ["StepGraph", "StepGraphs", "Turn", "Turns"]
