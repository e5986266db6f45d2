"""Numbers from a symbolic graph: what masks, biases and layouts are, found by running them on chosen tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from semkv.ir.graph import attribute, describe, placeholders
from semkv.ir.recurrence import Choice, recur
from semkv.passes.graph_utils import SHAPE_ONLY, argument, value_dependents

aten = torch.ops.aten


class Rejected(Exception):
    """Why something that looks like attention is not one that can be rewritten; the text of a `CaptureError`."""


MOVES = frozenset(
    {
        aten.reshape.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.repeat.default,
        aten.repeat_interleave.self_int,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.index.Tensor,
        aten.index_select.default,
        aten.t.default,
        aten.movedim.int,
        aten.swapaxes.default,
    }
)
"""Operations that move numbers and change none; the tensor is their first argument."""

POSITIONAL = frozenset(
    {aten.slice.Tensor, aten.index.Tensor, aten.select.int, aten.embedding.default, aten.index_select.default}
)
"""Reads from constants at places, which sampled evaluation translates or runs as they are."""

CREATIONS = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.full.default,
        aten.ones.default,
        aten.zeros.default,
        aten.scalar_tensor.default,
    }
)

SCATTERS = frozenset({aten.scatter.value, aten.scatter.src})

UNTAGGED = frozenset(
    getattr(getattr(aten, name), overload)
    for name, overload in (
        *((name, form) for name in ("__and__", "__or__", "__xor__") for form in ("Tensor", "Scalar")),
        *((name, "Tensor") for name in ("rsub", "masked_fill", "subtract", "multiply", "less", "greater", "not_equal")),
        *((name, "Tensor") for name in ("less_equal", "greater_equal")),
        *((name, "default") for name in ("floor_divide", "negative", "expand_as", "broadcast_to", "cat", "stack")),
        *(("where", form) for form in ("self", "ScalarOther", "ScalarSelf", "Scalar")),
        ("to", "dtype"),
        ("fill", "Scalar"),
    )
)
"""Pointwise operations that torch does not tag so, and those that put tensors together."""

SAMPLED = MOVES | POSITIONAL | CREATIONS | UNTAGGED | SHAPE_ONLY
"""Operations besides pointwise ones that sampled evaluation runs as they are, on the chosen tokens."""


class Sizes:
    """Concrete sizes for the symbols of a captured graph: B rows of T tokens."""

    def __init__(self, module: GraphModule) -> None:
        inputs = placeholders(module.graph)
        self.shape_symbols: tuple[set, set] = (set(), set())
        for name in ("input_ids", "positions"):
            value = inputs[name].meta.get("val")
            if isinstance(value, Tensor):
                for axis in (0, 1):
                    size = value.shape[axis]
                    if isinstance(size, torch.SymInt):
                        self.shape_symbols[axis].update(size.node.expr.free_symbols)
        ids = inputs["input_ids"].meta["val"]
        self.fixed_rows = ids.shape[0] if isinstance(ids.shape[0], int) else None

    def value(self, size: Any, rows: int, length: int) -> Any:
        """The number (or truth value) that a symbolic size becomes for `rows` rows of `length` tokens."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        expression = size.node.expr
        known = dict.fromkeys(self.shape_symbols[0], rows) | dict.fromkeys(self.shape_symbols[1], length)
        unknown = expression.free_symbols - known.keys()
        if unknown:
            raise Rejected(
                f"size {expression} depends on data ({', '.join(map(str, unknown))}), not on batch and length alone"
            )
        result = expression.subs(known)
        if isinstance(size, torch.SymInt):
            return int(result)
        return bool(result) if isinstance(size, torch.SymBool) else float(result)

    def shape(self, node: Node, rows: int, length: int) -> tuple[int, ...]:
        """The concrete shape of a tensor node."""
        return tuple(self.value(size, rows, length) for size in node.meta["val"].shape)

    def is_length(self, size: Any) -> bool:
        """Whether a size is the number of tokens."""
        return isinstance(size, torch.SymInt) and all(self._try(size, n) == n for n in (5, 11))

    def grows(self, size: Any) -> bool:
        """Whether a size changes with the number of tokens."""
        return isinstance(size, torch.SymInt) and self._try(size, 5) != self._try(size, 11)

    def _try(self, size: torch.SymInt, length: int) -> int | None:
        try:
            return self.value(size, 2, length)
        except Rejected:
            return None


class Evaluator:
    """Values of nodes for given tokens, where they depend on sizes, positions and constants alone.

    Parameters
    ----------
    module: the graph; nothing in it is changed.

    Attributes
    ----------
    tainted: nodes whose values depend on token ids; reading one that `known` does not give is a rejection.
    read: names of the constants that were read.
    choices: nodes that give the places of the tokens that attention reads. chosen: what they give, whole numbers [rows, tokens, n];
        None: all tokens.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.sizes = Sizes(module)
        inputs = placeholders(module.graph)
        self.ids, self.positions = inputs["input_ids"], inputs["positions"]
        self.tainted = value_dependents([self.ids])
        self.read: set[str] = set()
        self.rows = self.sizes.fixed_rows or 2
        self.choices = frozenset(n for n in module.graph.nodes if _is_choice(module, n))
        self.chosen: Tensor | None = None
        self.order = {node: place for place, node in enumerate(module.graph.nodes)}

    def run(
        self,
        target: Node,
        length: int,
        *,
        known: dict[Node, Tensor] | None = None,
        points: Tensor | None = None,
        exact: frozenset[Node] | set[Node] = frozenset(),
    ) -> Any:
        """The value of `target` for `rows` rows of `length` tokens.

        Parameters
        ----------
        known: values that take the place of nodes.
        points: positions [length] at which the tokens stand, ascending; every count of tokens inside the graph then
            gives these positions instead of 0 to length - 1, so that large distances need few tokens.
        exact: nodes in which conversions between floating dtypes are skipped.

        Raises
        ------
        Rejected: the value depends on token ids, or sampled positions do not fit an operation on the way.
        """
        values: dict[Node, Any] = dict(known or {})
        for node in self._needed(target, values):
            values[node] = self._value(node, values, length, points, exact)
        return values[target]

    def _needed(self, target: Node, known: dict[Node, Any]) -> list[Node]:
        found: set[Node] = set()
        waiting = [target]
        while waiting:
            node = waiting.pop()
            if node in found or node in known:
                continue
            found.add(node)
            if _is_size(node) or node in self.choices:
                continue
            inputs = node.all_input_nodes
            if node.target in SHAPE_ONLY:
                inputs = [n for n in inputs if n is not node.args[0] or node.args[0] not in self.tainted]
            waiting.extend(inputs)
        if not found <= self.order.keys():
            self.order = {node: place for place, node in enumerate(self.module.graph.nodes)}
        ordered = sorted(found, key=self.order.__getitem__)
        if self.ids in found:
            raise Rejected(f"it depends on token values through {describe(self._culprit(ordered))}")
        return ordered

    def _culprit(self, ordered: list[Node]) -> Node:
        """Of the nodes that bring token values in, the last that does more than move or combine numbers."""
        guilty = [node for node in ordered if node in self.tainted]
        telling = [
            n for n in guilty if n.target not in SAMPLED and torch.Tag.pointwise not in getattr(n.target, "tags", ())
        ]
        return (telling or guilty)[-1]

    def _value(
        self, node: Node, values: dict[Node, Any], length: int, points: Tensor | None, exact: Iterable[Node]
    ) -> Any:
        if _is_size(node):
            return self.sizes.value(node.meta["val"], self.rows, length)
        if node in self.choices:
            every = torch.arange(length, dtype=torch.int64, device="cpu").expand(self.rows, length, length)
            return (every if self.chosen is None else self.chosen).to(node.meta["val"].dtype)
        if node.op == "placeholder":
            return self._position_rows(length, points)
        if node.op == "get_attr":
            self.read.add(str(node.target))
            return attribute(self.module, str(node.target)).detach().cpu()
        if node.target in SHAPE_ONLY and node.args[0] in self.tainted and node.args[0] not in values:
            like = node.args[0].meta["val"]
            values = values | {
                node.args[0]: torch.empty(
                    self.sizes.shape(node.args[0], self.rows, length), dtype=like.dtype, device="cpu"
                )
            }
        if node in exact and node.target == aten.to.dtype:
            return values[node.args[0]]
        if points is not None:
            translated = self._translate(node, values, length, points)
            if translated is not None:
                return translated
        if node.target in (aten.to.device, aten.to.dtype_layout, aten._to_copy.default):
            return values[node.args[0]].to(node.meta["val"].dtype)  # everything is evaluated on one device
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")}
        return node.target(*args, **kwargs)

    def _position_rows(self, length: int, points: Tensor | None) -> Tensor:
        row = torch.arange(length, dtype=torch.int64, device="cpu") if points is None else points
        return row.expand(self.rows, length).contiguous()

    def _translate(self, node: Node, values: dict[Node, Any], length: int, points: Tensor) -> Tensor | None:
        """What an operation that counts or cuts tokens gives when they stand at `points`; None: run it as it is."""
        target = node.target
        read = map_arg(node.args, values.__getitem__)
        if target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
            return self._arange(node, read, points)
        if target == aten.diff.default and self._counts_tokens(node.args[0]):
            return torch.ones(self.sizes.shape(node, self.rows, length), dtype=read[0].dtype, device="cpu")
        if target == aten.cumsum.default:
            return self._cumsum(node, read, points)
        if target in (aten.tril.default, aten.triu.default):
            return self._triangle(node, read, points)
        if target == aten.slice.Tensor:
            return self._slice(node, read, points)
        if target in (aten.index.Tensor, aten.index_select.default):
            return self._index(node, read, points)
        if target in SCATTERS and self._chosen_index(node.args[2]):
            return None  # places of tokens among those that there are
        allowed = target in SAMPLED or (
            isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        )
        if not allowed and self._grows(node):
            raise Rejected(f"{describe(node)} cannot be sampled at chosen positions")
        return None

    def _chosen_index(self, node: Node) -> bool:
        """Whether the node is a choice's, converted or moved."""
        while node not in self.choices and node.target in (*MOVES, aten.to.dtype, aten._to_copy.default):
            node = node.args[0]
        return node in self.choices

    def _grows(self, node: Node) -> bool:
        value = node.meta.get("val")
        operands = [n.meta.get("val") for n in node.all_input_nodes]
        return any(self.sizes.grows(s) for v in (value, *operands) if isinstance(v, Tensor) for s in v.shape)

    def _counts_tokens(self, node: Node) -> bool:
        return any(self.sizes.is_length(size) for size in node.meta["val"].shape)

    def _arange(self, node: Node, read: tuple, points: Tensor) -> Tensor | None:
        size = node.meta["val"].shape[0]
        if not self.sizes.grows(size):
            return None
        if not self.sizes.is_length(size):
            raise Rejected(f"{describe(node)} counts {size} places, expected one per token")
        start, step = 0, 1
        if node.target in (aten.arange.start, aten.arange.start_step):
            start = read[0]
        if node.target == aten.arange.start_step and len(read) > 2:
            step = read[2]
        return (start + step * points).to(node.meta["val"].dtype)

    def _cumsum(self, node: Node, read: tuple, points: Tensor) -> Tensor | None:
        source, dim = read[0], read[1]
        if not self.sizes.is_length(node.args[0].meta["val"].shape[dim]):
            return None
        first = source.narrow(dim, 0, 1)
        if not bool((source == first).all()):
            raise Rejected(f"{describe(node)} sums over tokens that are not alike")
        shape = [1] * source.dim()
        shape[dim] = -1
        return (first.to(node.meta["val"].dtype) * (points + 1).reshape(shape)).to(node.meta["val"].dtype)

    def _triangle(self, node: Node, read: tuple, points: Tensor) -> Tensor | None:
        shape = node.meta["val"].shape
        if not (self.sizes.is_length(shape[-1]) and self.sizes.is_length(shape[-2])):
            return None
        ahead = points[None, :] - points[:, None]
        diagonal = argument(node, "diagonal", 0)
        keep = ahead <= diagonal if node.target == aten.tril.default else ahead >= diagonal
        return torch.where(keep, read[0], torch.zeros_like(read[0]))

    def _slice(self, node: Node, read: tuple, points: Tensor) -> Tensor | None:
        dim = argument(node, "dim", 0)
        before, after = node.args[0].meta["val"].shape[dim], node.meta["val"].shape[dim]
        if not self.sizes.grows(after) and not self.sizes.grows(before):
            return None
        if self.sizes.is_length(before) and self.sizes.is_length(after):
            return read[0]
        if not self.sizes.grows(before) and self.sizes.is_length(after):
            # As many tokens as the last position needs decide where a cut from the end of a constant begins.
            start = self._at_length(argument(node, "start"), int(points[-1]) + 1) or 0
            places = (start + before if start < 0 else start) + points
            if int(places.max()) >= before or int(places.min()) < 0:
                raise Rejected(f"{describe(node)} reads {before} places, too few for position {int(places.max())}")
            return read[0].index_select(dim, places)
        if self.sizes.is_length(before) and not self.sizes.grows(after):
            return None  # the first tokens, or the last
        raise Rejected(f"{describe(node)} cuts {before} places to {after}, which sampled positions do not fit")

    def _at_length(self, size: Any, length: int) -> Any:
        return self.sizes.value(size.meta["val"], self.rows, length) if isinstance(size, Node) else size

    def _index(self, node: Node, read: tuple, points: Tensor) -> Tensor | None:
        """Gathering from one value per token: positions are translated to the ranks of the tokens."""
        source = node.args[0].meta["val"]
        if node.target == aten.index_select.default:
            indices = [None] * (read[1] % source.dim()) + [read[2]]
        else:
            indices = list(read[1])
        translated = []
        for dim, index in enumerate(indices):
            if index is not None and index.dtype == torch.int64 and self.sizes.is_length(source.shape[dim]):
                rank = torch.searchsorted(points, index.contiguous())
                if not bool((points[rank.clamp_max(len(points) - 1)] == index).all()):
                    raise Rejected(f"{describe(node)} gathers between the sampled positions")
                index = rank
            translated.append(index)
        return aten.index.Tensor(read[0], translated)


def _is_choice(module: GraphModule, node: Node) -> bool:
    """Whether the node is what a `Choice` returns."""
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, Node) or call.target is not recur:
        return False
    return isinstance(attribute(module, str(call.args[0].target)), Choice)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
