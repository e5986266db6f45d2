"""A graph that one call cannot compute, cut at the nodes that there are no instructions for: what lies between is computed by calls.

Nodes keep their order, as some write in place. Views of inputs are made where they are needed, so that what is written to them is written
to the inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from semkv.kernels.segments.blocks import moved
from semkv.kernels.segments.operation import bare
from semkv.kernels.segments.operators import STAND_FOR
from semkv.kernels.segments.reading import Reading, Recipe, filled, flat_values, made_by
from semkv.kernels.segments.tape import layout_of
from semkv.kernels.segments.values import LAYOUTS, UnsupportedNode, Value

Made = Callable[[GraphModule], Callable[..., tuple[Any, ...]]]
LEAST = 8
"""Nodes with instructions of a part that is worth a call."""


UNKNOWN = object()
"""In place of what a node makes, where that cannot be told without numbers."""


@dataclass
class Roles:
    """What becomes of nodes. outside: computed by PyTorch. free: made wherever they are needed, as views of inputs and sizes are. changed:
    those that write to an input, and return it. bases: what the tensors of all others lie in; written: what is written in place."""

    outside: set[Node] = field(default_factory=set)
    free: set[Node] = field(default_factory=set)
    changed: set[Node] = field(default_factory=set)
    bases: dict[Node, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)


def roles_of(reading: Reading, inputs: Sequence[Any]) -> Roles:
    """Those of all nodes, for inputs of these layouts. Bases of inputs and weights are their numbers, others are below 0."""
    roles, buffers = Roles(), 0
    values: list[Any] = [
        Value(number, 0, layout_of(x)) if isinstance(x, Tensor) else x
        for number, x in enumerate((*inputs, *reading.weights))
    ]
    for recipe in reading.recipes:
        node, given = recipe.node, [values[number] for number in recipe.asked]
        roles.written |= _written(recipe, given)
        made, emitted = UNKNOWN, None
        try:
            if not any(x is UNKNOWN for x in given):
                made, emitted = made_by(recipe, given)
        except UnsupportedNode:
            made, buffers = _without_numbers(recipe, given, buffers), buffers + 1
            roles.outside.add(node)
        if emitted is not None:
            made, buffers = moved(emitted.made, flat_values(given), buffers), buffers + len(emitted.fresh)
        values.append(made)
        if made is UNKNOWN or (_is_item(node) and node.args[0] in roles.outside):
            roles.outside.add(node)
        if node not in roles.outside:
            _sort(node, made, emitted is not None and bool(emitted.steps), roles)
    return roles


def _sort(node: Node, made: Any, steps: bool, roles: Roles) -> None:
    """Note the role of a node that there are instructions for."""
    found = flat_values([made])
    if all(x.base >= 0 for x in found) and not steps:
        roles.free.add(node)
    elif found and all(x.base >= 0 for x in found):
        roles.changed.add(node)
    elif type(made) is Value:
        roles.bases[node] = made.base


def _without_numbers(recipe: Recipe, given: Sequence[Any], buffers: int) -> Any:
    """What a node makes that there is no instruction for: values in a new buffer, or in the one that it returns views of."""
    target = STAND_FOR.get(recipe.node.target, recipe.node.target)
    kwargs = {name: bare(x) for name, x in filled(recipe.kwargs, given).items()}
    kwargs |= {"device": "meta"} if "device" in kwargs else {}
    try:
        result = target(*bare(filled(recipe.args, given)), **kwargs)
    except Exception:  # whatever an operator raises
        return UNKNOWN
    schema, base = getattr(target, "_schema", None), ~buffers
    if schema is not None and any(x.alias_info is not None for x in schema.returns):
        base = flat_values(given)[0].base

    def value(x: Any) -> Any:
        if isinstance(x, Tensor):
            return Value(base, 0, LAYOUTS.of(x))
        return [value(part) for part in x] if isinstance(x, (list, tuple)) else x

    return value(result)


def _written(recipe: Recipe, given: Sequence[Any]) -> set[int]:
    """The bases that a node writes to in place."""
    schema = getattr(STAND_FOR.get(recipe.node.target, recipe.node.target), "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    arguments = dict(zip([x.name for x in schema.arguments], filled(recipe.args, given))) | filled(recipe.kwargs, given)
    own = [arguments.get(x.name) for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    return {x.base for x in flat_values(own)}


def cut(module: GraphModule, roles: Roles, made: Made) -> GraphModule | None:
    """The same graph with what `made` makes of its parts, graphs that return tuples. None: no part is worth it, or what is written in place
    would be copied."""
    return _Cutting(module, roles, made).cut()


class _Cutting:
    """One walk over the nodes of a graph."""

    def __init__(self, module: GraphModule, roles: Roles, made: Made) -> None:
        self.module, self.roles, self.made = module, roles, made
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.part: dict[Node, None] = {}
        self.crossing: list[int] = []
        self.calls = 0

    def cut(self) -> GraphModule | None:
        nodes, roles = list(self.module.graph.nodes), self.roles
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self.copies[node] = self.graph.node_copy(node)
        for node in nodes:
            if node.op == "output" or node in roles.outside:
                if not (_is_item(node) and node.args[0] in self.copies):
                    self._close()
                self.copies[node] = self.graph.node_copy(node, self._outer)
            elif node not in self.copies and node not in roles.free:
                items = [x for x in node.users if _is_item(x) and x not in roles.free and x not in roles.outside]
                self.part |= dict.fromkeys([node, *items])
        crossing = [base for base in self.crossing if base in roles.written]
        if not self.calls or len(set(crossing)) < len(crossing):
            return None
        return GraphModule(self.module, self.graph, class_name=type(self.module).__name__)

    def _before(self, node: Node) -> Node:
        """What a node is that returns what it has written to."""
        while node in self.roles.changed:
            node = node.all_input_nodes[0]
        return node

    def _outer(self, node: Node) -> Node:
        """What a node is outside of all parts."""
        node = self._before(node)
        if node not in self.copies:
            assert node in self.roles.free
            self.copies[node] = self.graph.node_copy(node, self._outer)
        return self.copies[node]

    def _close(self) -> None:
        """Put a call in the place of the part, or copy its nodes where they are few."""
        part, self.part = self.part, {}
        if sum(not _is_item(node) for node in part) < LEAST:
            for node in part:
                self.copies[node] = self.graph.node_copy(node, self._outer)
            return
        inside, own = Graph(), {}
        given = list(dict.fromkeys(x for node in part for x in self._needed(node, part)))
        for node in given:
            own[node] = inside.placeholder(node.name)

        def inner(node: Node) -> Node:
            node = self._before(node)
            if node not in own:
                own[node] = inside.node_copy(node, inner)
            return own[node]

        for node in part:
            own[node] = inside.node_copy(node, inner)
        wanted = [x for x in part if x not in self.roles.changed and any(user not in part for user in x.users)]
        inside.output(tuple(own[node] for node in wanted))
        self.crossing += [self.roles.bases[node] for node in wanted if node in self.roles.bases]
        computed = self.made(GraphModule(self.module, inside))

        def call(*values: Any) -> tuple[Any, ...]:
            return computed(*values)

        call.__name__ = f"part_{self.calls}"
        self.calls += 1
        made = self.graph.call_function(call, tuple(self.copies[node] for node in given))
        for place, node in enumerate(wanted):
            self.copies[node] = self.graph.call_function(operator.getitem, (made, place))

    def _needed(self, node: Node, part: dict[Node, None]) -> list[Node]:
        """What a node of a part, or one that is made within it, takes from elsewhere."""
        found = []
        for source in map(self._before, node.all_input_nodes):
            if source in self.roles.free:
                found += self._needed(source, part)
            elif source not in part and source.op != "get_attr":
                found.append(source)
        return found


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem


__all__ = ["Roles", "cut", "roles_of"]
