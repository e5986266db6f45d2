"""Where the attention is in a graph: every fused operator, and every softmax over the tokens with its two products."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from semkv.ir.graph import describe
from semkv.passes.attention_probe import MOVES, Evaluator, Rejected
from semkv.passes.graph_utils import SHAPE_ONLY, argument

aten = torch.ops.aten

FUSED = aten.scaled_dot_product_attention.default
SOFTMAXES = frozenset({aten.softmax.int, aten._softmax.default, aten._safe_softmax.default})
PRODUCTS = frozenset({aten.matmul.default, aten.bmm.default})
MAXIMA = frozenset({aten.amax.default, aten.max.dim})

AFTER_SOFTMAX = MOVES | {
    aten.to.dtype,
    aten.slice.Tensor,
    aten.narrow.default,
    aten.mul.Tensor,
    aten.where.self,
    aten.where.ScalarOther,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.nan_to_num.default,
}
"""What may stand between the softmax and the product with the values; its effect is measured, not assumed."""


@dataclass(frozen=True)
class Match:
    """One attention as it stands in the graph.

    Attributes
    ----------
    anchor: the softmax or the fused operator, for messages.
    output: the node that the site replaces: [*lead, T, Dv].
    queries, keys, values: operands of the products.
    score: the product of queries and keys; None for the fused operator.
    logits: what enters the softmax, without sinks and without the subtraction of its maximum.
    sinks: what is concatenated to the scores and takes mass without a value: [..., 1].
    sinks_per_row: sinks come as [..., T|1], as a gate on the output, instead of [..., T|1, 1].
    product: the product of weights and values; None for the fused operator.
    weights: the softmax (or the fused operator itself), and `weighted` the operand of the second product made from it.
    keys_transposed: keys come as [..., D, T], as the second operand of a product has them.
    swapped: the product is keys @ queries^T.
    region: the nodes from the product to the softmax.
    """

    anchor: Node
    output: Node
    queries: Node
    keys: Node
    values: Node
    score: Node | None = None
    logits: Node | None = None
    sinks: Node | None = None
    sinks_per_row: bool = False
    product: Node | None = None
    weights: Node | None = None
    weighted: Node | None = None
    swapped: bool = False
    region: frozenset[Node] = field(default=frozenset())


def find_matches(graph: Graph, evaluator: Evaluator) -> list[Match]:
    """All attentions in execution order.

    Raises
    ------
    Rejected: a softmax over the tokens that cannot be understood; the text names it.
    """
    matches: list[Match] = []
    for node in graph.nodes:
        if node.target == FUSED:
            matches.append(Match(node, node, *node.args[:3]))
        elif node.op == "call_function" and node.target in SOFTMAXES and _over_tokens(node, evaluator):
            try:
                matches.extend(_match_softmax(node, evaluator))
            except Rejected as reason:
                raise Rejected(
                    f"{describe(node)} is a softmax over the tokens, but no attention that can be rewritten: {reason}"
                ) from reason
    return sorted(matches, key=lambda match: evaluator.order[match.output])


def _over_tokens(node: Node, evaluator: Evaluator) -> bool:
    """Whether the softmax runs over an axis that grows with the sequence; a router's runs over experts."""
    return evaluator.sizes.grows(node.meta["val"].shape[node.args[1]])


def _match_softmax(node: Node, evaluator: Evaluator) -> list[Match]:
    rank = node.meta["val"].dim()
    if node.args[1] not in (-1, rank - 1):
        raise Rejected(f"it runs over axis {node.args[1]} of {rank}, expected the last")
    logits, sinks = _before_softmax(node.args[0], evaluator)
    score, region = _score_region(logits, evaluator)
    left, right = score.args[:2]
    found = []
    for product, weighted in _value_products(node, evaluator):
        if product.args[0] is not weighted:
            raise Rejected(f"{describe(product)} has the weights as its second operand, expected weights @ values")
        output, gate = _sink_gate(product, logits) if sinks is None else (product, None)
        found.append(
            Match(
                anchor=node,
                output=output,
                queries=left,
                keys=right,
                values=product.args[1],
                score=score,
                logits=logits,
                sinks=sinks or gate,
                sinks_per_row=gate is not None,
                product=product,
                weights=node,
                weighted=weighted,
                region=region,
            )
        )
    if not found:
        raise Rejected("no product with values follows it")
    return found


def _before_softmax(node: Node, evaluator: Evaluator) -> tuple[Node, Node | None]:
    """The scores and the sinks beneath casts, the subtraction of the maximum, and the concatenation of sinks."""
    while True:
        if node.target == aten.to.dtype or (
            node.target == aten.sub.Tensor and _is_maximum_of(node.args[1], node.args[0])
        ):
            node = node.args[0]
        else:
            break
    if node.target != aten.cat.default:
        return node, None
    parts, dim = node.args[0], argument(node, "dim", 0)
    if dim not in (-1, node.meta["val"].dim() - 1) or len(parts) != 2:
        raise Rejected(
            f"{describe(node)} concatenates {len(parts)} parts on axis {dim}; expected scores and sinks on the last"
        )
    scores = [part for part in parts if evaluator.sizes.is_length(part.meta["val"].shape[-1])]
    sinks = [part for part in parts if part not in scores]
    if len(scores) != 1 or sinks[0].meta["val"].shape[-1] != 1:
        raise Rejected(f"{describe(node)} concatenates to the scores what is not one sink per row")
    return scores[0], sinks[0]


def _is_maximum_of(node: Node, source: Node) -> bool:
    while node.target in (aten.unsqueeze.default, aten.to.dtype, operator.getitem):
        node = node.args[0]
    return node.target in MAXIMA and node.args[0] is source


def _sink_gate(product: Node, logits: Node) -> tuple[Node, Node | None]:
    """Where the output is scaled by `sigmoid(logsumexp(scores) - sink)`, the scaled output and the sinks.

    That factor is what a sink in the softmax's denominator leaves to the tokens.
    """
    for user in product.users:
        if user.target != aten.mul.Tensor or len(product.users) != 1:
            continue
        (gate,) = [operand for operand in user.args if operand is not product]
        sigmoid = _beneath_moves(gate)
        if not isinstance(sigmoid, Node) or sigmoid.target != aten.sigmoid.default:
            continue
        difference = _beneath_moves(sigmoid.args[0])
        if difference.target != aten.sub.Tensor or not isinstance(difference.args[1], Node):
            continue
        total = _beneath_moves(difference.args[0])
        if total.target == aten.logsumexp.default and _beneath_moves(total.args[0]) is _beneath_moves(logits):
            return user, difference.args[1]
    return product, None


def _beneath_moves(node: Node) -> Node:
    """The node beneath casts and views."""
    while isinstance(node, Node) and node.target in (aten.to.dtype, aten.unsqueeze.default, aten.reshape.default):
        node = node.args[0]
    return node


def _score_region(logits: Node, evaluator: Evaluator) -> tuple[Node, frozenset[Node]]:
    """The one product of queries and keys that the scores come from, and the nodes between the two."""
    region: set[Node] = set()
    products: list[Node] = []
    waiting = [logits]
    while waiting:
        node = waiting.pop()
        if node in region or node in products or node in evaluator.choices:
            continue
        if node.target in PRODUCTS and _is_square(node, evaluator):
            products.append(node)
            continue
        if node.op == "placeholder":
            raise Rejected("its mask depends on token values: it reads input_ids")
        if isinstance(node.target, torch._ops.OpOverload) and node.target in PRODUCTS | {aten.linear.default}:
            raise Rejected(f"its scores depend on {describe(node)} besides one product of queries and keys")
        region.add(node)
        if node.target not in SHAPE_ONLY:
            waiting.extend(operand for operand in node.all_input_nodes if operand in evaluator.tainted)
    if len(products) != 1:
        raise Rejected(
            f"its scores come from {len(products)} products over the tokens, expected one of queries and keys"
        )
    return products[0], frozenset(region)


def _is_square(node: Node, evaluator: Evaluator) -> bool:
    shape = node.meta["val"].shape
    return len(shape) >= 3 and evaluator.sizes.is_length(shape[-1]) and evaluator.sizes.is_length(shape[-2])


def _value_products(weights: Node, evaluator: Evaluator) -> list[tuple[Node, Node]]:
    """The products that the weights enter, each with the operand made from the weights."""
    found: list[tuple[Node, Node]] = []
    waiting = [weights]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in seen or user.target in SHAPE_ONLY:
                continue
            seen.add(user)
            if user.target in PRODUCTS:
                found.append((user, node))
            elif user.target in AFTER_SOFTMAX:
                waiting.append(user)
            else:
                raise Rejected(f"its weights go through {describe(user)}")
    return found
