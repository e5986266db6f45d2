"""Small helpers on `torch.fx` graphs that passes, specs and analyses share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from semkv.ir.ops import attention

BODY_INPUTS = ("input_ids", "positions")
"""Placeholders of every body, in order; lowered bodies have `memory` as a third."""

_aten = torch.ops.aten
SIZE_READERS = frozenset(
    {
        _aten.sym_size.int,
        _aten.sym_numel.default,
        _aten.sym_stride.int,
        _aten.ones_like.default,
        _aten.zeros_like.default,
        _aten.empty_like.default,
        _aten.full_like.default,
        _aten.new_ones.default,
        _aten.new_zeros.default,
        _aten.new_empty.default,
        _aten.new_full.default,
    }
)
"""Operators that read the sizes of a tensor and not its numbers."""


def copy_graph_module(module: GraphModule) -> GraphModule:
    """A GraphModule with its own graph and node metadata, and the *same* parameters and buffers."""
    graph = Graph()
    output = graph.graph_copy(module.graph, {}, return_output_node=True)
    value, original = output if isinstance(output, tuple) else (output, None)
    node = graph.output(value)
    if original is not None:
        node.meta = dict(original.meta)
    copied = GraphModule(module, graph, class_name=type(module).__name__)
    copied.meta = dict(module.meta)
    return copied


def placeholders(graph: Graph) -> dict[str, Node]:
    """The placeholders by name, in order."""
    return {str(node.target): node for node in graph.nodes if node.op == "placeholder"}


def attention_nodes(graph: Graph) -> list[Node]:
    """The `semkv::attention` nodes in execution order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target == attention]


def output_value(graph: Graph) -> Node:
    """The one tensor that the graph returns."""
    (value,) = graph.output_node().args
    while isinstance(value, (tuple, list)):
        (value,) = value
    assert isinstance(value, Node)
    return value


def attribute(module: torch.nn.Module, target: str) -> object:
    """What a `get_attr` node with this target reads."""
    value: object = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and everything that they are computed from."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and everything that is computed from them."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.users)
    return found


def module_path(node: Node) -> str:
    """Where in the user's model the node comes from, `model.layers.3.self_attn` for example; empty where unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = path.removeprefix("L['self'].").removeprefix("L__self___")
    return path.strip(".")


def describe(node: Node) -> str:
    """`aten.cumsum.default (cumsum_3, in model.layers.0.attn)`: a node for people."""
    target = str(node.target) if node.op == "call_function" else f"{node.op} {node.target}"
    path = module_path(node)
    return f"{target} ({node.name}, in {path})" if path else f"{target} ({node.name})"


def reads_sizes_only(node: Node) -> bool:
    """Whether the node's value depends on the sizes of its tensor operands, never on their numbers."""
    return node.op == "call_function" and node.target in SIZE_READERS


def shape_of(node: Node) -> tuple | None:
    """The (symbolic) shape that the node's metadata has; None where it is no tensor or unknown."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def finish(module: GraphModule) -> GraphModule:
    """Remove dead code, check the graph's structure and recompile: the last step of each rewrite."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()
    return module
