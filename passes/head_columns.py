"""What the numbers of each head of an operand are made of: columns of a projection, or numbers that all heads share."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from semkv.ir.graph import shape_of
from semkv.passes.graph_utils import argument

aten = torch.ops.aten

VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
SAME = frozenset({aten.clone.default, aten.contiguous.default, aten.alias.default})


@dataclass(frozen=True)
class Columns:
    """Some of the last axis's numbers of an operand, in order.

    source: a `linear` on stored weights without a bias, whose output is one block of `block` numbers per head; or, where
    `block` is 0, a node [B, 1, T, width] that all heads share; None: nothing that is known. first, last: columns [first, last) of
    the block, or of the node.
    """

    source: Node | None
    first: int
    last: int
    block: int = 0

    @property
    def width(self) -> int:
        """Numbers per head."""
        return self.last - self.first

    @property
    def shared(self) -> bool:
        """Whether all heads have the same numbers."""
        return self.source is not None and self.block == 0


def columns_of(operand: Node) -> list[Columns]:
    """What an operand [B, heads, T, D] is made of, from its first column to its last; `Columns.source` is None where it is not known."""
    shape = shape_of(operand)
    if shape is None or len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        return [Columns(None, 0, 0)]
    return _joined(_columns(operand, 1, shape[1]))


def _columns(node: Node, axis: int, heads: int) -> list[Columns]:
    """The columns of `node` [B, T, heads, D] or [B, heads, T, D], whose heads are on `axis`."""
    shape = shape_of(node)
    assert shape is not None
    unknown = [Columns(None, 0, shape[3])]
    if shape[axis] == 1 and heads > 1:
        return [Columns(node, 0, shape[3])] if axis == 1 else unknown
    if node.op != "call_function":
        return unknown
    target = node.target
    if target in SAME:
        return _columns(node.args[0], axis, heads)
    if target == aten.transpose.int and {dim % 4 for dim in node.args[1:3]} == {1, 2}:
        return _columns(node.args[0], 3 - axis, heads)
    if target == aten.permute.default and [dim % 4 for dim in node.args[1]] == [0, 2, 1, 3]:
        return _columns(node.args[0], 3 - axis, heads)
    if target == aten.expand.default and _shape(node.args[0])[axis] == 1:
        return _columns(node.args[0], axis, heads)
    if target == aten.cat.default and argument(node, "dim") % 4 == 3:
        return [part for operand in node.args[0] for part in _columns(operand, axis, heads)]
    if target in (aten.slice.Tensor, aten.slice_scatter.default, aten.copy.default):
        return _of_slices(node, axis, heads, unknown)
    if target is operator.getitem:
        return _of_split(node, axis, heads, unknown)
    if target in VIEWS and axis == 2:
        return _of_projection(node.args[0], heads, shape[3], unknown)
    return unknown


def _of_slices(node: Node, axis: int, heads: int, unknown: list[Columns]) -> list[Columns]:
    """Columns taken out of others, or written over others."""
    if node.target == aten.copy.default:
        written = node.args[1]
        fits = (
            len(_shape(written)) == 4 and _shape(written)[3] == _shape(node)[3] and _shape(written)[axis] in (1, heads)
        )
        return _columns(written, axis, heads) if fits else unknown
    whole = node.args[0]
    if argument(node, "dim") % 4 != 3 or argument(node, "step") != 1:
        return unknown
    width = _shape(whole)[3]
    first, last, _ = slice(argument(node, "start"), argument(node, "end")).indices(width)
    parts = _columns(whole, axis, heads)
    if node.target == aten.slice.Tensor:
        return _cut(parts, first, last)
    return [*_cut(parts, 0, first), *_columns(node.args[1], axis, heads), *_cut(parts, last, width)]


def _of_split(node: Node, axis: int, heads: int, unknown: list[Columns]) -> list[Columns]:
    """One piece of a tensor that was split along its columns."""
    split, place = node.args
    if split.target not in (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default):
        return unknown
    if argument(split, "dim") % 4 != 3:
        return unknown
    widths = [value.shape[3] for value in split.meta["val"]]
    first = sum(widths[:place])
    return _cut(_columns(split.args[0], axis, heads), first, first + widths[place])


def _of_projection(linear: Node, heads: int, width: int, unknown: list[Columns]) -> list[Columns]:
    """All columns of a projection [B, T, heads * width] that was viewed as [B, T, heads, width]."""
    plain = linear.target == aten.linear.default and len(linear.args) == 2 and linear.args[1].op == "get_attr"
    if not plain or _shape(linear)[-1] != heads * width:
        return unknown
    return [Columns(linear, 0, width, width)]


def _shape(node: Node) -> Sequence[int]:
    return shape_of(node) or ()


def _cut(parts: Iterable[Columns], first: int, last: int) -> list[Columns]:
    """Columns [first, last) of those of `parts`."""
    found, place = [], 0
    for part in parts:
        low, high = max(first, place), min(last, place + part.width)
        if low < high:
            found.append(replace(part, first=part.first + low - place, last=part.first + high - place))
        place += part.width
    return found


def _joined(parts: list[Columns]) -> list[Columns]:
    """Neighbours that continue each other as one."""
    found: list[Columns] = []
    for part in parts:
        before = found[-1] if found else None
        if before is not None and (before.source, before.last, before.block) == (part.source, part.first, part.block):
            found[-1] = replace(before, last=part.last)
        else:
            found.append(part)
    return found


__all__ = ["Columns", "columns_of"]
