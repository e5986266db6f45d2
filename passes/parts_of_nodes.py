"""Nodes that compute a part of what others do: a part is asked for behind, and made of parts of what is before, down to the weights.

Where a graph needs some indices of one axis of a value only, the operator that makes the value needs some of its operands only, and so on:
a `linear` of which some columns are needed reads some rows of its weight. Where that ends (an operator that mixes along the axis),
the value is made whole and its part is taken: always right, and no smaller.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attribute, shape_of
from semkv.ir.ops import linear
from semkv.passes.graph_utils import argument, copy_context

aten = torch.ops.aten

Index = tuple[int, ...]
"""Places along one axis, ascending within what they are taken of."""

ALIKE = frozenset(
    {
        *(aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.alias.default),
        *(aten.dropout.default, aten.detach.default, aten.type_as.default, aten.gelu.default, aten.where.self),
        *(aten.to.dtype_layout, aten.softplus.default, aten.clamp.default, aten.pow.Tensor_Scalar),
    }
)
"""Operators besides those with torch's tag `pointwise` that treat every number by itself."""
VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})
REDUCTIONS = frozenset({aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default})
ALONG = frozenset({aten.softmax.int, aten._softmax.default, aten.cumsum.default, aten.flip.default, aten.sort.default})
"""Operators that mix along the axes in their second argument, and keep the shape."""
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int})
GROUPED = ("grouped_mm_fallback", "_grouped_mm")
"""Names of operators (x [n, K], weights [E, K, N], ends [E]) -> [n, N]: tokens in runs, each run by a weight of its own."""


def is_grouped(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.split("::")[1] in GROUPED


@dataclass(eq=False)
class Parts:
    """Makes parts of the values of `body`, for the pass `by`; new nodes stand right behind those that they are parts of.

    given: nodes of which a part exists already, (axis, its index, the node). cut: nodes whose whole value a part was taken of. touched:
    all nodes of which a part was made. Both are of all calls; `begin` empties them. weights: what new `get_attr` nodes will read, (tensor,
    axis, index); `store` makes those that are still used. made: the nodes. passed: for each of them what was cut and touched.
    """

    body: GraphModule
    by: str
    given: dict[Node, tuple[int, Index, Node]] = field(default_factory=dict)
    cut: list[Node] = field(default_factory=list)
    touched: set[Node] = field(default_factory=set)
    weights: dict[Node, tuple[str, int, Index]] = field(default_factory=dict)
    made: dict[tuple[Node, int, Index], Node] = field(default_factory=dict)
    passed: dict[tuple[Node, int, Index], tuple[list[Node], set[Node]]] = field(default_factory=dict)
    stored: dict[tuple[int, int, Index], Tensor] = field(default_factory=dict)
    """Parts of tensors that exist, which other graphs of the model may share."""

    def begin(self) -> None:
        self.cut, self.touched = [], set()

    def part(self, node: Node, axis: int, index: Index) -> Node:
        """A node whose value is that of `node` at `index` of `axis`."""
        shape = shape_of(node)
        assert shape is not None
        axis %= len(shape)
        if isinstance(shape[axis], int) and index == tuple(range(shape[axis])):
            return node
        key = (node, axis, index)
        if key not in self.made:
            outer, self.cut, self.touched = (self.cut, self.touched), [], set()
            self.touched.add(node)
            new = self._new(node, axis, index)
            if new is None:
                self.cut.append(node)
                new = self.taken(node, axis, index)
            self.passed[key], self.made[key] = (self.cut, self.touched), new
            self.cut, self.touched = outer
        cut, touched = self.passed[key]
        self.cut.extend(cut)
        self.touched |= touched
        return self.made[key]

    def taken(self, node: Node, axis: int, index: Index) -> Node:
        """The part, taken of the whole."""
        with self.body.graph.inserting_before(node.next):
            first, last = index[0] if index else 0, index[-1] + 1 if index else 0
            if index == tuple(range(first, last)):
                return self._node(node, axis, len(index), aten.slice.Tensor, (node, axis, first, last))
            places = self.constant(index)
        with self.body.graph.inserting_before(places.next):
            return self._node(node, axis, len(index), aten.index_select.default, (node, axis, places))

    def constant(self, values: Index) -> Node:
        """A `get_attr` of int64 [n], at the graph's insertion point."""
        device = next((x.device for x in self.body.state_dict().values()), torch.device("cpu"))
        name = f"places_{len([x for x, _ in self.body.named_buffers(recurse=False) if x.startswith('places_')])}"
        self.body.register_buffer(name, torch.tensor(values, dtype=torch.int64, device=device))
        return self.body.graph.get_attr(name)

    def store(self) -> int:
        """Have the parts of weights that the graph reads; how many there are."""
        stored, count = self.stored, 0
        reads = Counter(str(node.target) for node in self.body.graph.nodes if node.op == "get_attr")
        alive = [node for node in self.weights if not node._erased]
        kinds = Counter(self.weights[node][0] for node in alive)
        for node, (target, axis, index) in self.weights.items():
            if node._erased:
                continue
            held = attribute(self.body, target)
            assert isinstance(held, Tensor)
            key = (id(held), axis, index)
            if key not in stored:
                places = torch.tensor(index, dtype=torch.int64, device=held.device)
                own = held.detach().index_select(axis, places)
                stored[key] = (
                    torch.nn.Parameter(own, requires_grad=False) if isinstance(held, torch.nn.Parameter) else own
                )
            if not reads[target] and kinds[target] == 1:  # all that is left of it may have its name
                node.target = target
            path, _, leaf = str(node.target).rpartition(".")
            owner = self.body.get_submodule(path)
            if isinstance(stored[key], torch.nn.Parameter):
                owner.register_parameter(leaf, stored[key])
            else:
                owner.register_buffer(leaf, stored[key])
            count += 1
        return count

    def _node(
        self, like: Node, axis: int, size: int, target: Callable, args: tuple, kwargs: dict | None = None
    ) -> Node:
        new = self.body.graph.call_function(target, args, kwargs or {})
        copy_context(new, like, self.by)
        new.meta["val"] = resized(like.meta.get("val"), axis, size)
        return new

    def _new(self, node: Node, axis: int, index: Index) -> Node | None:
        """The part, made of parts; None where it cannot be."""
        if node in self.given:
            own_axis, has, new = self.given[node]
            if own_axis != axis or not set(index) <= set(has):
                return None
            places = tuple(has.index(place) for place in index)
            return new if places == tuple(range(len(has))) else self.taken(new, axis, places)
        if node.op == "get_attr":
            with self.body.graph.inserting_before(node.next):
                new = self.body.graph.create_node("get_attr", f"{node.target}_part{len(self.weights)}")
            new.meta = {**node.meta, "val": resized(node.meta.get("val"), axis, len(index))}
            self.weights[new] = (str(node.target), axis, index)
            return new
        if node.op != "call_function":
            return None
        found = call_of(self, node, axis, index)
        if found is None or isinstance(found, Node):
            return found
        target, args, kwargs = found
        behind = max([node, *(x for x in _nodes((args, kwargs)))], key=_place)
        with self.body.graph.inserting_before(behind.next):
            return self._node(node, axis, len(index), target, args, kwargs)


def _place(node: Node) -> Any:
    return node._sort_key


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(value, lambda x: found.append(x))
    return found


def resized(value: Any, axis: int, size: int) -> Any:
    """A (fake) tensor like `value` with `size` places along `axis`."""
    if not isinstance(value, Tensor):
        return value
    shape = list(value.shape)
    shape[axis] = size
    return value.new_empty(shape)


Call = tuple[Callable, tuple, dict]


def call_of(parts: Parts, node: Node, axis: int, index: Index) -> Call | Node | None:
    """The call that makes a part of `node`; None where this operator cannot, or a node that is it already."""
    target, shape = node.target, shape_of(node)
    assert shape is not None
    rank = len(shape)
    if is_pointwise(target):
        return _pointwise(parts, node, axis, index, rank)
    if target in VIEWS:
        return _view(parts, node, axis, index, shape)
    if target is operator.getitem:
        return _piece_of_split(parts, node, axis, index)
    if target in (aten.linear.default, linear):
        return _linear(parts, node, axis, index, rank)
    if target in (aten.matmul.default, aten.bmm.default, aten.mm.default):
        return _matmul(parts, node, axis, index, rank)
    if target == aten.addmm.default:
        return _addmm(parts, node, axis, index)
    if is_grouped(target):
        return _grouped(parts, node, axis, index)
    if target == aten.embedding.default and axis == rank - 1:
        return target, (parts.part(node.args[0], 1, index), *node.args[1:]), dict(node.kwargs)
    if target in (aten.cat.default, aten.stack.default):
        return _cat(parts, node, axis, index, rank)
    if target in NORMS and rank - len(node.args[1]) > axis:
        return target, (parts.part(node.args[0], axis, index), *node.args[1:]), dict(node.kwargs)
    if target in ALONG and isinstance(node.args[1], (int, list, tuple)):
        dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        if axis not in [dim % rank for dim in dims]:
            return target, (parts.part(node.args[0], axis, index), *node.args[1:]), dict(node.kwargs)
        return None
    return _moved(parts, node, axis, index, rank)


def is_pointwise(target: Any) -> bool:
    if target in ALIKE:
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _pointwise(parts: Parts, node: Node, axis: int, index: Index, rank: int) -> Call | None:
    def own(operand: Any) -> Any:
        shape = shape_of(operand) if isinstance(operand, Node) else None
        if shape is None:
            return operand
        at = axis - (rank - len(shape))
        return operand if at < 0 or (isinstance(shape[at], int) and shape[at] == 1) else parts.part(operand, at, index)

    return node.target, tuple(map(own, node.args)), {name: own(value) for name, value in node.kwargs.items()}


def _view(parts: Parts, node: Node, axis: int, index: Index, after: tuple) -> Call | None:
    """Axes that both shapes have in common keep their part; where sizes are regrouped, it must be a part of one axis again."""
    source = node.args[0]
    before = shape_of(source)
    found = None if before is None else _regrouped(before, after, axis)
    if found is None:
        return None
    (start, inner), (first, outer) = found
    sizes = list(node.args[1])
    sizes[axis] = len(index)
    places = torch.arange(math.prod(inner), dtype=torch.int64, device="cpu")
    wanted = (
        places.view(outer).index_select(axis - first, torch.tensor(index, dtype=torch.int64, device="cpu")).flatten()
    )
    for at in range(len(inner)):
        own = torch.unique((wanted // math.prod(inner[at + 1 :])) % inner[at])
        if torch.equal(places.view(inner).index_select(at, own).flatten(), wanted):
            return aten.reshape.default, (parts.part(source, start + at, tuple(own.tolist())), sizes), {}
    return None


def _regrouped(before: tuple, after: tuple, axis: int) -> tuple[tuple[int, tuple], tuple[int, tuple]] | None:
    """The sizes in front of a view that become those around `axis`, and these: (first axis, sizes) each; None where they are not whole
    numbers."""
    i, j = len(before), len(after)
    while i and j:
        end_i, end_j = i, j
        i, j = i - 1, j - 1
        if not _same(before[i], after[j]):
            left, right = before[i], after[j]
            while isinstance(left, int) and isinstance(right, int) and left != right:
                if left < right:
                    i -= 1
                    left *= before[i] if i >= 0 and isinstance(before[i], int) else 0
                else:
                    j -= 1
                    right *= after[j] if j >= 0 and isinstance(after[j], int) else 0
                if not left or not right:
                    return None
            if not isinstance(left, int) or not isinstance(right, int):
                return None
        if j <= axis < end_j:
            inner, outer = before[i:end_i], after[j:end_j]
            return ((i, inner), (j, outer)) if isinstance(outer[axis - j], int) else None
    return None


def _same(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else not isinstance(a, int) and str(a) == str(b)


def _piece_of_split(parts: Parts, node: Node, axis: int, index: Index) -> Call | Node | None:
    split, number = node.args
    if not isinstance(split, Node) or split.target not in SPLITS:
        return None
    source = split.args[0]
    values = split.meta["val"]
    rank = len(shape_of(source) or ())
    dim = int(argument(split, "dim", 0)) % rank
    if split.target == aten.unbind.int:
        parts.touched.add(split)
        own = axis + (axis >= dim)
        return aten.select.int, (parts.part(source, own, index), dim, number), {}
    start = sum(int(value.shape[dim]) for value in values[:number]) if _known(values, dim) else None
    if start is None:
        return None
    parts.touched.add(split)
    if axis == dim:
        return parts.part(source, dim, tuple(start + place for place in index))
    end = start + int(values[number].shape[dim])
    return aten.slice.Tensor, (parts.part(source, axis, index), dim, start, end), {}


def _known(values: Any, dim: int) -> bool:
    return all(isinstance(value.shape[dim], int) for value in values)


def _linear(parts: Parts, node: Node, axis: int, index: Index, rank: int) -> Call:
    x, weight, *bias = node.args
    if axis != rank - 1:
        return node.target, (parts.part(x, axis, index), weight, *bias), {}
    own = [None if operand is None else parts.part(operand, 0, index) for operand in bias]
    return node.target, (x, parts.part(weight, 0, index), *own), {}


def _matmul(parts: Parts, node: Node, axis: int, index: Index, rank: int) -> Call | None:
    x, y = node.args
    left, right = shape_of(x), shape_of(y)
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        return None
    if axis == rank - 1:
        return node.target, (x, parts.part(y, len(right) - 1, index)), {}
    if axis == rank - 2:
        return node.target, (parts.part(x, len(left) - 2, index), y), {}
    own = []
    for operand, shape in ((x, left), (y, right)):
        at = axis - (rank - len(shape))
        own.append(operand if at < 0 or shape[at] == 1 else parts.part(operand, at, index))
    return node.target, tuple(own), {}


def _addmm(parts: Parts, node: Node, axis: int, index: Index) -> Call | None:
    bias, x, y = node.args
    if node.kwargs:
        return None
    shape = shape_of(bias) or ()
    if axis == 1:
        own = parts.part(bias, len(shape) - 1, index) if shape and shape[-1] != 1 else bias
        return node.target, (own, x, parts.part(y, 1, index)), {}
    return (node.target, (bias, parts.part(x, 0, index), y), {}) if len(shape) < 2 else None


def _grouped(parts: Parts, node: Node, axis: int, index: Index) -> Call | None:
    x, weights, *rest = node.args
    if axis != 1 or len(shape_of(weights) or ()) != 3:
        return None
    return node.target, (x, parts.part(weights, 2, index), *rest), dict(node.kwargs)


def _cat(parts: Parts, node: Node, axis: int, index: Index, rank: int) -> Call | None:
    operands, dim = list(node.args[0]), int(argument(node, "dim", 0)) % rank
    if node.target == aten.stack.default:
        if dim == axis:
            return None
        return node.target, ([parts.part(x, axis - (dim < axis), index) for x in operands], *node.args[1:]), {}
    if dim != axis:
        return node.target, ([parts.part(x, axis, index) for x in operands], *node.args[1:]), {}
    sizes = [(shape_of(x) or (None,) * rank)[dim] for x in operands]
    if not all(isinstance(size, int) for size in sizes):
        return None
    own, start, rest = [], 0, list(index)
    for x, size in zip(operands, sizes, strict=True):
        inside = []
        while rest and start <= rest[0] < start + size:
            inside.append(rest.pop(0) - start)
        if inside:
            own.append(parts.part(x, dim, tuple(inside)))
        start += size
    return None if rest else (node.target, (own, *node.args[1:]), {})


def _moved(parts: Parts, node: Node, axis: int, index: Index, rank: int) -> Call | Node | None:
    """Operators that move, add or drop axes."""
    target, args = node.target, list(node.args)
    source = args[0] if args and isinstance(args[0], Node) else None
    before = shape_of(source) if source is not None else None
    if source is None or before is None:
        return None
    old = len(before)

    def made(own: int, *rest: Any) -> Call:
        return target, (parts.part(source, own, index), *rest), dict(node.kwargs)

    if target == aten.transpose.int:
        a, b = (dim % rank for dim in args[1:3])
        return made({a: b, b: a}.get(axis, axis), *args[1:])
    if target == aten.t.default:
        return made(1 - axis) if rank == 2 else None
    if target == aten.permute.default:
        return made(args[1][axis] % rank, *args[1:])
    if target == aten.unsqueeze.default:
        dim = args[1] % rank
        return None if dim == axis else made(axis - (dim < axis), *args[1:])
    if target in (aten.squeeze.dim, aten.select.int):
        dim = args[1] % old
        if target == aten.squeeze.dim and before[dim] != 1:
            return made(axis, *args[1:]) if dim != axis else None
        return made(axis + (axis >= dim), *args[1:])
    if target == aten.slice.Tensor:
        dim = int(argument(node, "dim", 0)) % rank
        if dim != axis:
            return made(axis, *args[1:])
        return _of_slice(parts, node, dim, index, before[dim])
    if target == aten.expand.default:
        sizes = list(args[1])
        sizes[axis] = len(index)
        own = axis - (rank - old)
        if own < 0 or before[own] == 1:
            return target, (source, sizes, *args[2:]), dict(node.kwargs)
        return made(own, sizes, *args[2:])
    if target in REDUCTIONS:
        return _reduction(parts, node, axis, index, old)
    if target == aten.view_as_complex.default:
        return made(axis)
    if target == aten.view_as_real.default:
        return made(axis) if axis < rank - 1 else None
    if target in (aten.index.Tensor, aten.index_select.default):
        return _indexed(parts, node, axis, index, before)
    return None


def _of_slice(parts: Parts, node: Node, dim: int, index: Index, size: Any) -> Node | None:
    if not isinstance(size, int):
        return None
    start, step = argument(node, "start", 0) or 0, argument(node, "step", 1)
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    start = max(0, start + size) if start < 0 else min(start, size)
    return parts.part(node.args[0], dim, tuple(start + place * step for place in index))


def _reduction(parts: Parts, node: Node, axis: int, index: Index, old: int) -> Call | None:
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    reduced = {dim % old for dim in dims}
    kept = bool(argument(node, "keepdim", False))
    own = axis if kept else [dim for dim in range(old) if dim not in reduced][axis]
    if own in reduced:
        return None
    return node.target, (parts.part(node.args[0], own, index), *node.args[1:]), dict(node.kwargs)


def _indexed(parts: Parts, node: Node, axis: int, index: Index, before: tuple) -> Call | None:
    source = node.args[0]
    if node.target == aten.index_select.default:
        dim = node.args[1] % len(before)
        return None if dim == axis else (node.target, (parts.part(source, axis, index), *node.args[1:]), {})
    used = [at for at, place in enumerate(node.args[1]) if place is not None]
    if len(used) != 1:
        return None
    (at,) = used
    inner = len(shape_of(node.args[1][at]) or ())
    if at <= axis < at + inner:
        return None
    own = axis if axis < at else axis - inner + 1
    return node.target, (parts.part(source, own, index), *node.args[1:]), {}
