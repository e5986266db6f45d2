"""Ways between a projection and an attention site that treat every head alike: permuting weights permutes heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from semkv.ir.graph import shape_of

aten = torch.ops.aten

POINTWISE = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.add.Scalar,
        aten.neg.default,
        aten.tanh.default,
        aten.rsqrt.default,
        aten.pow.Tensor_Scalar,
        aten.clamp.default,
        aten.to.dtype,
        aten._to_copy.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.alias.default,
        aten.dropout.default,
    }
)
VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
NORMS = {aten.layer_norm.default, aten.rms_norm.default}


@dataclass(frozen=True)
class Producer:
    """A `linear` whose output rows (or input columns) are blocks of `width` numbers, one block per head."""

    linear: Node
    width: int


def producers_of(operand: Node, uses: set[Node], place: int, heads: int) -> list[Producer] | None:
    """The projections that make an operand [B, heads, T, D] of the attention nodes `uses`; None where heads
    are not alike.

    None also where anything else reads a value on the way: it would see permuted heads.
    """
    path: set[Node] = set()
    found: dict[Node, Producer] = {}
    if not _trace(operand, 1, heads, path, found) or not found:
        return None
    for node in path:
        for user in node.users:
            if user in path:
                continue
            if not (node is operand and user in uses and _only_place(user, node, place)):
                return None
    return list(found.values())


def _only_place(user: Node, node: Node, place: int) -> bool:
    return all((argument is node) == (number == place) for number, argument in enumerate(user.args))


def _trace(node: Node, axis: int, heads: int, path: set[Node], found: dict[Node, Producer]) -> bool:
    """Walk back from `node`, whose heads are on `axis`; False when something on the way tells heads apart."""
    if node in path:
        return True
    shape = shape_of(node)
    if node.op != "call_function" or shape is None or axis >= len(shape) or shape[axis] != heads:
        return False
    path.add(node)
    target = node.target
    if target in VIEWS:
        return _trace_view(node, axis, heads, path, found)
    if target == aten.transpose.int:
        dims = [dim % len(shape) for dim in node.args[1:3]]
        swapped = {dims[0]: dims[1], dims[1]: dims[0]}
        return _trace(node.args[0], swapped.get(axis, axis), heads, path, found)
    if target == aten.permute.default:
        return _trace(node.args[0], node.args[1][axis] % len(shape), heads, path, found)
    if target == aten.unsqueeze.default:
        dim = node.args[1] % len(shape)
        return dim != axis and _trace(node.args[0], axis - (dim < axis), heads, path, found)
    if target == aten.slice.Tensor:
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
        return dim != axis and _trace(node.args[0], axis, heads, path, found)
    if target in (aten.cat.default, aten.stack.default):
        return _trace_cat(node, axis, heads, path, found)
    if target == aten.mean.dim:
        dims = [dim % len(shape) for dim in node.args[1]]
        kept = len(node.args) > 2 and node.args[2]
        return bool(kept) and axis not in dims and _trace(node.args[0], axis, heads, path, found)
    if target in NORMS:
        return len(shape) - len(node.args[1]) > axis and _trace(node.args[0], axis, heads, path, found)
    if target in POINTWISE:
        return all(_trace_operand(operand, axis, len(shape), heads, path, found) for operand in node.all_input_nodes)
    return False


def _trace_operand(
    operand: Node, axis: int, rank: int, heads: int, path: set[Node], found: dict[Node, Producer]
) -> bool:
    """An operand of a pointwise node either has the head axis too, or is the same for all heads."""
    shape = shape_of(operand)
    if shape is None:
        return operand.op != "get_attr" and not isinstance(operand.meta.get("val"), torch.Tensor)
    own = axis - (rank - len(shape))
    if own < 0 or shape[own] == 1:
        return True
    return _trace(operand, own, heads, path, found)


def _trace_cat(node: Node, axis: int, heads: int, path: set[Node], found: dict[Node, Producer]) -> bool:
    rank = len(shape_of(node) or ())
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    if dim == axis:
        return False
    own = axis - (node.target == aten.stack.default and dim < axis)
    return all(_trace(operand, own, heads, path, found) for operand in node.args[0])


def _trace_view(node: Node, axis: int, heads: int, path: set[Node], found: dict[Node, Producer]) -> bool:
    """Either the head axis stays in place, or the view splits [..., heads * D] of a projection."""
    before, after = shape_of(node.args[0]), shape_of(node)
    if before is None or after is None:
        return False
    if len(before) > axis and tuple(before[: axis + 1]) == tuple(after[: axis + 1]):
        return _trace(node.args[0], axis, heads, path, found)
    splits = len(after) == axis + 2 and len(before) == axis + 1 and isinstance(after[-1], int)
    if not splits or before[-1] != heads * after[-1]:
        return False
    return _accept_linear(node.args[0], after[-1], path, found)


def _accept_linear(node: Node, width: int, path: set[Node], found: dict[Node, Producer]) -> bool:
    """A `linear` on stored weights, possibly behind casts and clamps, which treat every number alike."""
    while node.target in POINTWISE and len(node.all_input_nodes) == 1:
        path.add(node)
        node = node.all_input_nodes[0]
    if node.target != aten.linear.default or any(operand.op != "get_attr" for operand in _parameters(node)):
        return False
    path.add(node)
    found[node] = Producer(node, width)
    return True


def _parameters(linear: Node) -> list[Node]:
    return [operand for operand in linear.args[1:3] if operand is not None]


def consumer_of(attention: Node, heads: int, width: int) -> Producer | None:
    """The projection that alone reads an attention's output [B, heads, T, Dv], its input columns in blocks of heads."""
    node, axis = attention, 1
    while len(node.users) == 1:
        (user,) = node.users
        before, after = shape_of(node), shape_of(user)
        if before is None or after is None:
            return None
        if user.target == aten.linear.default:
            fits = user.args[0] is node and before[-1] == heads * width and axis == len(before) - 1
            return Producer(user, width) if fits and user.args[1].op == "get_attr" else None
        if user.target == aten.transpose.int:
            dims = [dim % len(after) for dim in user.args[1:3]]
            axis = {dims[0]: dims[1], dims[1]: dims[0]}.get(axis, axis)
        elif user.target in VIEWS:
            if axis == len(before) - 2 and len(after) == len(before) - 1 and after[-1] == heads * width:
                axis = len(after) - 1
            elif tuple(before) != tuple(after):
                return None
        elif not (user.target in POINTWISE and len(user.all_input_nodes) == 1):
            return None
        node = user
    return None
