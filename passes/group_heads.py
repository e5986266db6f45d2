"""Make the KV heads of one role contiguous, by permuting weights: exact, and each role's heads become one slice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attention_nodes, attribute, copy_graph_module, finish
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite, head_order
from semkv.passes.base import Pass, PassOptions
from semkv.passes.head_paths import Producer, consumer_of, producers_of

aten = torch.ops.aten

PER_HEAD_INPUTS = ((4, "sinks"), (5, "bias_slopes"), (6, "bias_table"))
"""Operands of `semkv::attention` whose first axis is the query head."""


class GroupHeads(Pass):
    """Reorder KV heads (and the query heads that read them) so that heads of one role stand side by side."""

    name = "group_heads"
    needs = "annotated"
    leaves = "annotated"
    after = ("assign_budgets",)

    def applies(self, program: Program, options: PassOptions) -> bool:
        return any(site.roles and head_order(site.roles) != tuple(range(site.kv_heads)) for site in program.sites)

    def run(self, program: Program, options: PassOptions) -> Program:
        """Permute the projections where the way from the weight to the site treats all heads alike, else the
        activations.
        """
        body = copy_graph_module(program.body)
        nodes = dict(zip((site.index for site in program.sites), attention_nodes(body.graph)))
        folded = selected = 0
        sites = {site.index: site for site in program.sites}
        for owner in program.stores:
            readers = [site for site in program.sites if site.store == owner.store]
            order = head_order(owner.roles) if owner.roles else tuple(range(owner.kv_heads))
            if order == tuple(range(owner.kv_heads)):
                continue
            counts = _permute_store(body, readers, nodes, order)
            folded, selected = folded + counts[0], selected + counts[1]
            for site in readers:
                roles = tuple(owner.roles[head] for head in order)
                before = site.head_order or tuple(range(site.kv_heads))
                among = site.among
                if among is not None:
                    query = _Order(order, site.group_size).query
                    kv, asking = tuple(among.kv[head] for head in order), tuple(among.query[head] for head in query)
                    among = replace(among, kv=kv, query=asking)
                moved = tuple(before[head] for head in order)
                sites[site.index] = replace(site, roles=roles, head_order=moved, among=among)
        note = f"{self.name}: {folded} projections permuted, {selected} activations reordered at run time"
        return program.evolve(
            note, body=copy_graph_module(finish(body)), sites=tuple(sites[site.index] for site in program.sites)
        )


@dataclass(frozen=True)
class _Order:
    """The permutation for KV heads, and for the query heads of one site."""

    kv: tuple[int, ...]
    group: int

    @property
    def query(self) -> tuple[int, ...]:
        return tuple(head * self.group + member for head in self.kv for member in range(self.group))


def _permute_store(
    body: GraphModule, readers: list[AttentionSite], nodes: dict[int, Node], kv_order: tuple[int, ...]
) -> tuple[int, int]:
    """Permute every operand and result of the store's sites; returns how many were folded and how many reordered."""
    counts = [0, 0]
    attentions = [nodes[site.index] for site in readers]
    for place in (1, 2):
        for operand in dict.fromkeys(node.args[place] for node in attentions):
            uses = {node for node in attentions if node.args[place] is operand}
            counts[_permute_operand(body, operand, uses, place, kv_order)] += 1
    for site, node in zip(readers, attentions):
        order = _Order(kv_order, site.group_size).query
        counts[_permute_operand(body, node.args[0], {node}, 0, order)] += 1
        _permute_extras(body, node, order)
        counts[_restore_output(body, node, order, site)] += 1
    return counts[0], counts[1]


def _permute_operand(body: GraphModule, operand: Node, uses: set[Node], place: int, order: tuple[int, ...]) -> int:
    """Permute the heads (axis 1) of an operand of attention; 0: folded into weights, 1: reordered at run time."""
    producers = producers_of(operand, uses, place, len(order))
    if producers is not None:
        for producer in producers:
            _permute_linear(body, producer, order, rows=True)
        return 0
    first = min(uses, key=list(body.graph.nodes).index)
    with body.graph.inserting_before(first):
        new = _select(body, operand, 1, order)
    for node in uses:
        node.update_arg(place, new)
    return 1


def _restore_output(body: GraphModule, node: Node, order: tuple[int, ...], site: AttentionSite) -> int:
    """Undo the permutation of query heads after attention; 0 when folded into the output projection, 1 when not."""
    consumer = consumer_of(node, site.q_heads, site.value_dim)
    if consumer is not None:
        _permute_linear(body, consumer, order, rows=False)
        return 0
    inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
    with body.graph.inserting_after(node):
        index = _constant(body, inverse)
    with body.graph.inserting_after(index):
        restored = body.graph.call_function(aten.index_select.default, (node, 1, index))
    restored.meta = {key: value for key, value in node.meta.items() if key in ("val", "nn_module_stack")}
    node.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
    return 1


def _permute_extras(body: GraphModule, node: Node, order: tuple[int, ...]) -> None:
    """Sinks and biases have one row per query head."""
    for place, name in PER_HEAD_INPUTS:
        operand = node.args[place] if len(node.args) > place else node.kwargs.get(name)
        if not isinstance(operand, Node):
            continue
        with body.graph.inserting_before(node):
            new = _select(body, operand, 0, order)
        node.update_arg(place, new) if len(node.args) > place else node.update_kwarg(name, new)


def _select(body: GraphModule, operand: Node, axis: int, order: tuple[int, ...]) -> Node:
    """A node that reorders an axis, its constant before it; the insertion point is the caller's."""
    index = _constant(body, order)
    new = body.graph.call_function(aten.index_select.default, (operand, axis, index))
    new.meta = {key: value for key, value in operand.meta.items() if key in ("val", "nn_module_stack")}
    new.meta["semkv_pass"] = GroupHeads.name
    return new


def _constant(body: GraphModule, values: tuple[int, ...]) -> Node:
    device = next((tensor.device for tensor in body.state_dict().values()), torch.device("cpu"))
    name = "head_order_" + "_".join(map(str, values))
    if not hasattr(body, name):
        body.register_buffer(name, torch.tensor(values, dtype=torch.int64, device=device))
    return body.graph.get_attr(name)


def _permute_linear(body: GraphModule, producer: Producer, order: tuple[int, ...], *, rows: bool) -> None:
    """Give the linear a weight whose head blocks (output rows, or input columns) are reordered; its bias alike."""
    node = producer.linear
    index = torch.tensor(
        [head * producer.width + i for head in order for i in range(producer.width)], dtype=torch.int64, device="cpu"
    )
    for place in (1, 2) if rows else (1,):
        operand = node.args[place] if len(node.args) > place else None
        if operand is None:
            continue
        tensor = attribute(body, str(operand.target))
        axis = 0 if rows else 1
        with body.graph.inserting_before(node):
            replaced = _store(
                body, f"{operand.target}_by_role", tensor.detach().index_select(axis, index.to(tensor.device))
            )
        replaced.meta = dict(operand.meta)
        node.update_arg(place, replaced)


def _store(body: GraphModule, target: str, tensor: Tensor) -> Node:
    path, _, leaf = target.rpartition(".")
    body.get_submodule(path).register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return body.graph.get_attr(target)
