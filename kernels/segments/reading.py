"""A graph as a list of recipes: what of its nodes does not depend on sizes is found once, and what does once for each of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attribute
from semkv.kernels.segments.operators import emit
from semkv.kernels.segments.values import Emitted, UnsupportedNode, Value, expect

MOST_EMITTED = 1 << 15
"""Emitted nodes that are kept, in a process."""
OF_NUMBERS = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg)
"""Functions of sizes, as graphs have them."""

_patterns: dict[Any, int] = {}
_emitted: dict[tuple[Any, ...], Emitted] = {}


@dataclass(frozen=True)
class Place:
    """In arguments: what the node of that number among those that are asked has made."""

    number: int


@dataclass(frozen=True)
class Recipe:
    """A node. asked: numbers of the nodes that its arguments are of. args, kwargs: its arguments, with a `Place` for each of these.
    pattern: equal for nodes whose operators and arguments are."""

    node: Node
    asked: tuple[int, ...]
    args: list[Any]
    kwargs: dict[str, Any]
    pattern: int


class Reading:
    """The graph of a module. inputs: how many there are; weights: its parameters and buffers; recipes: of its calls; returned: what it
    returns, with a `Place` for each node. A node's number is its place among inputs, weights and calls, one behind the other.

    Raises
    ------
    UnsupportedNode
    """

    def __init__(self, module: GraphModule) -> None:
        kinds: dict[str, list[Node]] = {"placeholder": [], "get_attr": [], "call_function": []}
        for node in module.graph.nodes:
            if node.op != "output":
                expect(node.op in kinds, f"{node.name}: a node of kind {node.op}")
                kinds[node.op].append(node)
        self._numbers = {node: place for place, node in enumerate(x for own in kinds.values() for x in own)}
        self.inputs = len(kinds["placeholder"])
        found = [attribute(module, str(node.target)) for node in kinds["get_attr"]]
        self.weights = [x for x in found if isinstance(x, Tensor)]
        expect(len(self.weights) == len(found), "an attribute that is no tensor")
        self.recipes = [self._recipe(node) for node in kinds["call_function"]]
        self.returned = _placed(module.graph.output_node().args[0], self._numbers)

    def _recipe(self, node: Node) -> Recipe:
        places = {x: place for place, x in enumerate(node.all_input_nodes)}
        args, kwargs = _placed(node.args, places), _placed(node.kwargs, places)
        key = (node.target, _hashable(args), _hashable(kwargs))
        asked = tuple(self._numbers[x] for x in places)
        return Recipe(node, asked, args, kwargs, _patterns.setdefault(key, len(_patterns)))


def made_by(recipe: Recipe, given: Sequence[Any]) -> tuple[Any, Emitted | None]:
    """What a node makes of values, numbers and lists of them where it takes no instruction, sizes and items of lists; else (None, what it
    becomes). In that, the base of a value is its number among those `given`, and among those of lists in between (`flat_values`).

    Raises
    ------
    UnsupportedNode
    """
    target = recipe.node.target
    if target is operator.getitem:
        return given[0][recipe.args[1]], None
    if target == torch.ops.aten.sym_size.int:
        return given[0].shape[recipe.args[1]], None
    if target in OF_NUMBERS:
        return target(*filled(recipe.args, given)), None
    key = (recipe.pattern, *[x.layout if type(x) is Value else key_of(x) for x in given])
    found = _emitted.get(key)
    if found is None:
        own = renamed(given, iter(range(len(flat_values(given)))))
        try:
            found = emit(target, filled(recipe.args, own), filled(recipe.kwargs, own))
        except UnsupportedNode as reason:
            raise UnsupportedNode(f"{recipe.node.name} ({target}): {reason}") from None
        if len(_emitted) >= MOST_EMITTED:
            _emitted.clear()
        _emitted[key] = found
    return None, found


def flat_values(given: Sequence[Any]) -> list[Value]:
    """The values among `given` and its lists, in order."""
    found: list[Value] = []
    for x in given:
        if type(x) is Value:
            found.append(x)
        elif isinstance(x, list):
            found += flat_values(x)
    return found


def filled(x: Any, given: Sequence[Any]) -> Any:
    """x with what was made in the places."""
    if isinstance(x, Place):
        return given[x.number]
    if isinstance(x, dict):
        return {name: filled(part, given) for name, part in x.items()}
    return [filled(part, given) for part in x] if isinstance(x, list) else x


def places_in(x: Any) -> list[int]:
    """The numbers of all places in what was read."""
    if isinstance(x, Place):
        return [x.number]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return [number for part in parts for number in places_in(part)]


def _placed(x: Any, places: dict[Node, int]) -> Any:
    if isinstance(x, Node):
        return Place(places[x])
    if isinstance(x, dict):
        return {name: _placed(part, places) for name, part in x.items()}
    return [_placed(part, places) for part in x] if isinstance(x, (list, tuple)) else x


def _hashable(x: Any) -> Any:
    if isinstance(x, dict):
        return tuple((name, _hashable(part)) for name, part in x.items())
    return tuple(map(_hashable, x)) if isinstance(x, list) else (type(x), x)


def key_of(x: Any) -> Any:
    """What stands in a key for a list of values, or a number."""
    return tuple([y.layout if type(y) is Value else key_of(y) for y in x]) if isinstance(x, list) else (type(x), x)


def renamed(x: Any, bases: Iterator[int]) -> Any:
    """x, with the next of `bases` for each value."""
    if type(x) is Value:
        return Value(next(bases), 0, x.layout)
    return [renamed(part, bases) for part in x] if isinstance(x, (list, tuple)) else x


__all__ = ["Place", "Reading", "Recipe", "filled", "flat_values", "key_of", "made_by", "places_in", "renamed"]
