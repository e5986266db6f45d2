"""Write contractions as `matmul`: `einsum` of two operands, and the product inside `baddbmm`."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Node

from semkv.passes.graph_utils import argument, emit

aten = torch.ops.aten


def expand_baddbmm(node: Node, by: str) -> Node:
    """`beta * input + alpha * (a @ b)` with the product as a node of its own."""
    addend, left, right = node.args[:3]
    beta, alpha = argument(node, "beta", 1), argument(node, "alpha", 1)
    graph = node.graph
    with graph.inserting_before(node):
        product = emit(graph, aten.bmm.default, (left, right), like=node, by=by)
        if alpha != 1:
            product = emit(graph, aten.mul.Tensor, (product, alpha), like=node, by=by)
        if beta == 0:
            return product
        if beta != 1:
            addend = emit(graph, aten.mul.Tensor, (addend, beta), like=node, by=by)
        return emit(graph, aten.add.Tensor, (product, addend), like=node, by=by)


def expand_einsum(node: Node, by: str) -> Node | None:
    """The same value through permutations and one `matmul`; None where the equation is of another kind.

    Handled are two operands without repeated or ellipsis indices, where every index is a batch index (in both operands
    and the result), summed (in both operands only) or free (in one operand and the result).
    """
    equation, operands = node.args[0], node.args[1]
    if len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    if any(len(set(part)) != len(part) for part in (left, right, result)):
        return None
    batch = [i for i in result if i in left and i in right]
    summed = [i for i in left if i in right and i not in result]
    free_left = [i for i in result if i in left and i not in right]
    free_right = [i for i in result if i in right and i not in left]
    covered = set(batch + summed + free_left + free_right)
    if covered != set(left + right + result) or not summed:
        return None
    sizes: dict[str, tuple[Node, int]] = {}
    for operand, letters in zip(operands, (left, right)):
        if not isinstance(operand.meta.get("val"), Tensor):
            return None
        for place, letter in enumerate(letters):
            sizes.setdefault(letter, (operand, place))
    graph = node.graph
    with graph.inserting_before(node):
        size = {letter: _size(node, *where, by) for letter, where in sizes.items()}
        a = _arrange(node, operands[0], left, batch + free_left + summed, by)
        b = _arrange(node, operands[1], right, batch + summed + free_right, by)
        a = _merge(node, a, [size[i] for i in batch], [[size[i] for i in free_left], [size[i] for i in summed]], by)
        b = _merge(node, b, [size[i] for i in batch], [[size[i] for i in summed], [size[i] for i in free_right]], by)
        product = emit(graph, aten.matmul.default, (a, b), like=node, by=by)
        order = batch + free_left + free_right
        if len(free_left) != 1 or len(free_right) != 1:
            product = emit(graph, aten.reshape.default, (product, [size[i] for i in order]), like=node, by=by)
        return _arrange(node, product, "".join(order), list(result), by)


def _size(node: Node, operand: Node, place: int, by: str) -> Node | int:
    size = operand.meta["val"].shape[place]
    if isinstance(size, int):
        return size
    return emit(node.graph, aten.sym_size.int, (operand, place), like=node, by=by)


def _arrange(node: Node, operand: Node, letters: str, wanted: list[str], by: str) -> Node:
    order = [letters.index(letter) for letter in wanted]
    if order == list(range(len(order))):
        return operand
    return emit(node.graph, aten.permute.default, (operand, order), like=node, by=by)


def _merge(node: Node, operand: Node, batch: list, groups: list[list], by: str) -> Node:
    """Make each group of axes one axis, so that `matmul` sees [*batch, rows, columns]."""
    if all(len(group) == 1 for group in groups):
        return operand
    shape = list(batch)
    for group in groups:
        merged: Node | int = 1
        for size in group:
            if isinstance(merged, int) and isinstance(size, int):
                merged = merged * size
            elif isinstance(merged, int) and merged == 1:
                merged = size
            else:
                merged = _product(node, merged, size, by)
        shape.append(merged)
    return emit(node.graph, aten.reshape.default, (operand, shape), like=node, by=by)


def _product(node: Node, left: Node | int, right: Node | int, by: str) -> Node:
    return emit(node.graph, operator.mul, (left, right), like=node, by=by)
