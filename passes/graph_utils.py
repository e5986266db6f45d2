"""What rewrites share: making nodes with metadata and provenance, knowing what a node depends on, reading arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from semkv.ir.graph import module_path

aten = torch.ops.aten

SHAPE_ONLY = frozenset(
    {
        aten.sym_size.int,
        aten.sym_numel.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
        aten.rand_like.default,
    }
)
"""Operations that read the shape, dtype and device of their first argument, never its values."""


def emit(
    graph: Graph,
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    like: Node,
    by: str,
) -> Node:
    """A `call_function` node at the graph's insertion point, with the fake value of its result.

    `like` is the node in whose module it stands, `by` the pass that makes it: together its provenance.
    """
    node = graph.call_function(target, tuple(args), kwargs or {})
    copy_context(node, like, by)
    node.meta["val"] = fake_value(node)
    return node


def copy_context(node: Node, like: Node, by: str) -> None:
    """Give `node` the module stack of `like` and say that the pass `by` made it."""
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["origin"] = f"{module_path(like) or 'model'}: {by}"


def fake_value(node: Node) -> Any:
    """The node's result on the fake values of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = next((v.fake_mode for v in _fake_tensors((args, kwargs))), None)
    if mode is None:
        return node.target(*args, **kwargs)
    with mode:
        return node.target(*args, **kwargs)


def _fake_tensors(value: Any) -> Iterable[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _fake_tensors(item)
    elif isinstance(value, dict):
        yield from _fake_tensors(list(value.values()))


def replace_node(old: Node, new: Node) -> None:
    """Let every user of `old` read `new`, and remove `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def argument(node: Node, name: str, default: Any = None) -> Any:
    """The value that an ATen node passes for the schema argument `name`; its schema default where it passes none."""
    for place, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if place < len(node.args):
                return node.args[place]
            if name in node.kwargs:
                return node.kwargs[name]
            return declared.default_value if declared.has_default_value() else default
    return default


def same_shape(left: Node, right: Node) -> bool:
    """Whether two tensors are known to have one shape at every batch size and length."""
    a, b = left.meta.get("val"), right.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() != b.dim():
        return False
    return all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape))


def value_dependents(sources: Iterable[Node]) -> set[Node]:
    """The nodes whose *values* depend on the sources; reading a shape is no dependence."""
    found = set(sources)
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and user.target not in SHAPE_ONLY:
                found.add(user)
                waiting.append(user)
    return found
