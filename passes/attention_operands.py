"""Bring the operands of an attention to the operator's layout, keys and values before any head is repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from semkv.passes.attention_probe import MOVES, Evaluator
from semkv.passes.graph_utils import emit

aten = torch.ops.aten

PROBE_LENGTH = 7
"""Tokens of the arrays of labels that tell where numbers move."""

Arrange = Callable[[Tensor], Tensor]
"""From a concrete operand to [B, Hq, T, D], heads repeated where the attention repeats them."""


@dataclass(frozen=True)
class Operand:
    """An operand of a product, and how its numbers stand in [B, Hq, T, D]."""

    node: Node
    arrange: Arrange
    emit_arranged: Callable[[], Node]


class Layout:
    """Makes nodes in [B, H, T, D]; one source gets one node, so that layers that share keys read the same one."""

    def __init__(self, graph: Graph, evaluator: Evaluator, by: str) -> None:
        self.graph = graph
        self.evaluator = evaluator
        self.by = by
        self.made: dict[tuple, Node] = {}
        self._sizes: dict[int, Node] = {}

    def size(self, axis: int) -> Node | int:
        """The node of the batch size (axis 0) or of the length (axis 1), at the top of the graph."""
        size = self.evaluator.ids.meta["val"].shape[axis]
        if isinstance(size, int):
            return size
        if axis not in self._sizes:
            last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                self._sizes[axis] = emit(
                    self.graph, aten.sym_size.int, (self.evaluator.ids, axis), like=last, by=self.by
                )
        return self._sizes[axis]

    def group_size(self, operands: list[Operand], heads: int) -> int:
        """The largest G such that in each operand the query heads of every G in a row read the same numbers."""
        labels = [self._labels(operand, chain_of(operand.node)[-1]) for operand in operands]
        for group in range(heads, 0, -1):
            if heads % group == 0 and all(_constant_in_groups(label, group) for label in labels):
                return group
        return 1

    def bring(self, operand: Operand, group: int) -> Node:
        """A node with the operand as [B, Hq / group, T, D], heads not repeated: one that is there, or made from one."""
        candidates: list[tuple[Node, Tensor]] = []
        for node in chain_of(operand.node):
            labels = self._labels(operand, node)[:, ::group]
            if labels.numel() == _count(self.evaluator, node) and labels.unique().numel() == labels.numel():
                candidates.append((node, labels))
        for node, labels in candidates:
            if torch.equal(self._own_labels(node), labels):
                return node
        for node, labels in candidates:
            made = self._rearrange(node, labels)
            if made is not None:
                return made
        return self._cut(operand, group)

    def _own_labels(self, node: Node) -> Tensor:
        shape = self.evaluator.sizes.shape(node, self.evaluator.rows, PROBE_LENGTH)
        return torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device="cpu").reshape(shape)

    def _labels(self, operand: Operand, source: Node) -> Tensor:
        """[B, Hq, T, D] int64: which number of `source` stands where."""
        value = self.evaluator.run(operand.node, PROBE_LENGTH, known={source: self._own_labels(source)})
        return operand.arrange(value)

    def _rearrange(self, node: Node, labels: Tensor) -> Node | None:
        """`node` as [B, H, T, D] through at most one reshape and one permutation; None where that does not do it."""
        own = self._own_labels(node)
        if own.dim() == 4:
            for order in permutations(range(4)):
                if own.permute(order).shape == labels.shape and torch.equal(own.permute(order), labels):
                    return self._move(node, None, order)
        strides = [
            int(labels.select(axis, 1).flatten()[0] - labels.flatten()[0]) if n > 1 else 0
            for axis, n in enumerate(labels.shape)
        ]
        order = sorted(range(4), key=lambda axis: (-strides[axis], axis))
        if any(stride < 0 for stride in strides):
            return None
        sizes = [labels.shape[axis] for axis in order]
        back = [order.index(axis) for axis in range(4)]
        if not torch.equal(own.reshape(sizes).permute(back), labels):
            return None
        return self._move(node, order, tuple(back), labels.shape)

    def _move(
        self, node: Node, split: list[int] | None, order: tuple[int, ...], shape: torch.Size | None = None
    ) -> Node:
        key = (node, tuple(split) if split else None, order)
        if key not in self.made:
            made = node
            where = node
            if split is not None and shape is not None:
                symbolic = [self.size(0), shape[1], self.size(1), shape[3]]
                with self.graph.inserting_after(where):
                    made = emit(
                        self.graph,
                        aten.reshape.default,
                        (node, [symbolic[axis] for axis in split]),
                        like=node,
                        by=self.by,
                    )
                where = made
            if order != (0, 1, 2, 3):
                with self.graph.inserting_after(where):
                    made = emit(self.graph, aten.permute.default, (made, list(order)), like=node, by=self.by)
            self.made[key] = made
        return self.made[key]

    def _cut(self, operand: Operand, group: int) -> Node:
        """Every group's first head of the arranged operand: right for any layout, at the price of making the copies."""
        key = (operand.node, group)
        if key not in self.made:
            made = operand.emit_arranged()
            if group > 1:
                with self.graph.inserting_after(made):
                    made = emit(self.graph, aten.slice.Tensor, (made, 1, 0, 2**63 - 1, group), like=made, by=self.by)
            self.made[key] = made
        return self.made[key]


def chain_of(node: Node) -> list[Node]:
    """The node and what its numbers were moved from, nearest first."""
    chain = [node]
    while chain[-1].op == "call_function" and chain[-1].target in MOVES:
        chain.append(chain[-1].args[0])
    return chain


def _constant_in_groups(labels: Tensor, group: int) -> bool:
    batch, heads = labels.shape[:2]
    grouped = labels.reshape(batch, heads // group, group, *labels.shape[2:])
    return torch.equal(grouped, grouped[:, :, :1].expand_as(grouped))


def _count(evaluator: Evaluator, node: Node) -> int:
    return torch.Size(evaluator.sizes.shape(node, evaluator.rows, PROBE_LENGTH)).numel()
