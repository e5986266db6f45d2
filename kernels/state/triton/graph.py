"""A decode step's graph with kernels in Triton for the operators on a memory's tensors, which do what small operators around them did."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from semkv.ir import state_ops
from semkv.kernels.state.reference import choose_each_reference, choose_reference, products_reference, scores_reference
from semkv.kernels.state.triton import FORMS, launched
from semkv.kernels.state.triton.choose import choose_launches
from semkv.kernels.state.triton.products import products_launches
from semkv.kernels.state.triton.scores import scores_launches

aten = torch.ops.aten


def in_triton(module: GraphModule, device: torch.device) -> GraphModule:
    """`module`, changed in place, as it runs on `device`.

    No launches of their own are: a number that queries are multiplied by; their conversion to float32; the two products of a bound, with
    a query's numbers above 0 and with those below; a sum with a product of matrices, or with the total of scores; how many units are read.
    Tensors that follow from sizes alone are made once.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _join_sides(graph, node)
    for node in graph.find_nodes(op="call_function", target=state_ops.products):
        _put(graph, node, products_of, (*_given(node), 1.0))
    for node in graph.find_nodes(op="call_function", target=products_of):
        _join_scale(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        _join_factor(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _join_sum(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _join_total(graph, node)
    for node in graph.find_nodes(op="call_function", target=state_ops.choose):
        counted = _put(graph, node, counted_choice, node.args, node.kwargs)
        _take(graph, counted, 0, list(counted.users))
    for node in graph.find_nodes(op="call_function", target=state_ops.choose_each):
        node.target = counted_choices
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        _join_count(graph, node)
    for node in list(graph.nodes):
        _make_once(module, node, device)
    graph.eliminate_dead_code()  # while it sees which operators write
    for node in graph.nodes:
        node.target = FORMS.get(node.target, node.target)
    graph.lint()
    module.recompile()
    return module


# -- operators that do more --------------------------------------------------------------------------------------------


def products_of(
    q: Tensor,
    x: Tensor,
    scale: Tensor | None,
    bits: int,
    alpha: float,
    y: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """`semkv::products` of alpha * q, which may be in half precision; with y, of its numbers above 0 with x and of those below with y."""
    return _products(q, x, scale, bits, alpha=alpha, y=y, y_scale=y_scale)


def _products_reference(
    q: Tensor, x: Tensor, scale: Tensor | None, bits: int, *, alpha: float, y: Tensor | None, y_scale: Tensor | None
) -> Tensor:
    q = alpha * q.float()
    if y is None:
        return products_reference(q, x, scale, bits)
    sides = (q.clamp(min=0), x, scale), (q.clamp(max=0), y, y_scale)
    return torch.stack([products_reference(*side, bits) for side in sides]).sum(0)


def product_of(x: Tensor, y: Tensor, alpha: float, added: Tensor | None = None) -> Tensor:
    """alpha * (x [n, R, D] times y [n, D, M]); with what is added [..., R, M], in its shape."""
    if added is None:
        return torch.baddbmm(x[:, :, :1], x, y, beta=0, alpha=alpha)  # nothing is read of what is multiplied by 0
    return torch.baddbmm(added.view(x.shape[0], x.shape[1], y.shape[2]), x, y, alpha=alpha).view(added.shape)


def _choose_reference(*given: Any, each: bool = False, **named: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    if each:
        chosen, own = choose_each_reference(*given, **named)
        return chosen, own, own.sum(-1)
    chosen = choose_reference(*given, **named)
    return chosen, None, chosen.sum(-1)


def _scores_reference(logits: Tensor, count: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    score, total = scores_reference(logits, count)
    return score, total + added


_products, _choose = launched(products_launches, _products_reference), launched(choose_launches, _choose_reference)
_scores = launched(scores_launches, _scores_reference)


def scores_and(logits: Tensor, count: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """`semkv::scores`, whose total is more by added [B, H, R, 1]."""
    return _scores(logits, count, added)


def counted_choice(*given: Any, **named: Any) -> tuple[Tensor, None, Tensor]:
    """`semkv::choose`, nothing, and how many units each KV head reads, int64 [B, H]."""
    return _choose(*given, **named)


def counted_choices(*given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Both of `semkv::choose_each`, and how many units each row of queries reads, int64 [B, H, R]."""
    return _choose(*given, **named, each=True)


# -- what they take over -----------------------------------------------------------------------------------------------


def _join_sides(graph: Graph, node: Node) -> None:
    """The sum of products of the same numbers, above 0 and below, is one call."""
    products = _args(node)
    if len(node.args) != 2 or node.kwargs or not all(_is(x, state_ops.products) for x in products):
        return
    queries = [x.args[0] for x in products]
    if not all(_is(q, aten.clamp.default) for q in queries) or queries[0].args[0] is not queries[1].args[0]:
        return
    ends = [(*q.args[1:], None)[:2] for q in queries]
    (_, x, scale, bits), (_, y, y_scale, other) = (_given(x) for x in products)
    if ends == [(0, None), (None, 0)] and bits == other and (scale is None) == (y_scale is None):
        _put(graph, node, products_of, (queries[0].args[0], x, scale, bits, 1.0, y, y_scale))


def _join_scale(graph: Graph, node: Node) -> None:
    """A number that the queries of a product are multiplied by, and their conversion to float32."""
    q, x, scale, bits, alpha, *sides = _args(node)
    if _is(q, aten.mul.Tensor) and isinstance(q.args[1], (int, float)):
        q, alpha = q.args[0], alpha * q.args[1]
    if _is(q, aten.view.default) and _is(q.args[0], aten._to_copy.default):
        converted = q.args[0]
        if converted.kwargs == {"dtype": torch.float32}:
            with graph.inserting_before(node):
                q = graph.call_function(aten.view.default, (converted.args[0], *q.args[1:]))
    node.args = (q, x, scale, bits, alpha, *sides)


def _join_factor(graph: Graph, node: Node) -> None:
    """A number that the first of two matrices is multiplied by."""
    views, (x, other) = list[Any](), _args(node)
    while _is(x, aten.view.default) or _is(x, aten.expand.default):
        views.append(x)
        x = x.args[0]
    if not _is(x, aten.mul.Tensor) or not isinstance(x.args[1], (int, float)):
        return
    with graph.inserting_before(node):
        first = x.args[0]
        for view in reversed(views):
            first = graph.call_function(view.target, (first, *view.args[1:]))
    _put(graph, node, product_of, (first, other, x.args[1]))


def _join_sum(graph: Graph, node: Node) -> None:
    """What is added to a product of matrices, of its size."""
    if len(node.args) != 2 or node.kwargs or not _is(node.args[1], aten._unsafe_view.default):
        return
    added, view = _args(node)
    sizes = [x.meta["val"].shape for x in (added, view) if isinstance(x, Node) and "val" in x.meta]
    if _is(view.args[0], product_of) and len(sizes) == 2 and sizes[0] == sizes[1]:
        _put(graph, node, product_of, (*view.args[0].args, added))


def _join_total(graph: Graph, node: Node) -> None:
    """What is added to the total of scores, of its size."""
    if len(node.args) != 2 or node.kwargs or not _is(node.args[0], operator.getitem):
        return
    total, added = _args(node)
    scores, place = total.args
    sizes = [x.meta["val"].shape for x in (total, added) if isinstance(x, Node) and "val" in x.meta]
    alike = len(sizes) == 2 and sizes[0] == sizes[1]
    if place != 1 or not _is(scores, state_ops.scores) or len(total.users) > 1 or not alike:
        return
    if scores < added:  # which is computed later
        return
    _put(graph, scores, scores_and, (*scores.args, added))
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _join_count(graph: Graph, node: Node) -> None:
    """How many units are read is one more result of their choice."""
    read, axes, *_ = _args(node)
    if list(axes) != [-1] or node.kwargs or not _is(read, operator.getitem):
        return
    choice, place = read.args
    if (choice.target, place) in ((counted_choice, 0), (counted_choices, 1)):
        _take(graph, choice, 2, [])
        node.replace_all_uses_with(next(user for user in choice.users if user.args == (choice, 2)))
        graph.erase_node(node)


def _make_once(module: GraphModule, node: Node, device: torch.device) -> None:
    """Zeros whose size is known, and numbers, are a buffer."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or not all(isinstance(size, int) for size in val.shape):
        return
    if node.target in (aten.new_zeros.default, aten.zeros_like.default):
        value: Any = 0
    elif node.target == aten.scalar_tensor.default:
        (value,) = _args(node)
    else:
        return
    name = f"once_{node.name}"
    module.register_buffer(name, torch.full(val.shape, value, dtype=val.dtype, device=device))
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.get_attr(name))


# -- nodes -------------------------------------------------------------------------------------------------------------


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _is(x: Any, target: Any) -> bool:
    return isinstance(x, Node) and x.op == "call_function" and x.target == target


def _given(product: Node) -> tuple[Any, Any, Any, Any]:
    """q, x, scale and bits of a product."""
    given = dict(zip(("q", "x", "scale", "bits"), _args(product))) | product.kwargs
    return given["q"], given["x"], given.get("scale"), given.get("bits", 16)


def _put(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], named: Mapping[str, Any] | None = None) -> Node:
    """Another call in the place of `node`."""
    with graph.inserting_before(node):
        made = graph.call_function(target, args, dict(named or {}))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def _take(graph: Graph, node: Node, place: int, users: list[Node]) -> None:
    """One of the results of `node`, which `users` take in place of it."""
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, place))
    for user in users:
        user.replace_input_with(node, item)


__all__ = ["counted_choice", "counted_choices", "in_triton", "product_of", "products_of", "scores_and"]
