"""Tensor parallelism: each process has some KV heads with their projections, some channels of every MLP and expert, some of the vocabulary.

Nothing is known by a model's name. An attention needs its process's heads of queries, keys and values only, so what makes them is cut back
to the weights (`semkv.passes.parts_of_nodes`): rows of projections, whatever lies between. Where a product sums over channels that are made
that way, each process sums over its own, and one all-reduce adds the sums up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from semkv.ir.graph import attention_nodes, copy_graph_module, describe, finish, module_path, output_value, shape_of
from semkv.ir.ops import attention, linear
from semkv.ir.program import Program
from semkv.ir.ranks import Ranks, collectives
from semkv.ir.site import AttentionSite
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import emit
from semkv.passes.parts_of_nodes import Index, Parts, is_grouped, resized

aten = torch.ops.aten
NAME = "shard_heads"
PRODUCTS = frozenset({aten.linear.default, linear, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default})


class ShardHeads(Pass):
    """A program of one process among `options.ranks`, whose sites have its KV heads only."""

    name = NAME
    needs = "found"
    leaves = "found"
    after = ("surprisal_head", "find_seams")

    def applies(self, program: Program, options: PassOptions) -> bool:
        return options.ranks is not None and options.ranks.size > 1

    def run(self, program: Program, options: PassOptions) -> Program:
        """Cut body and head; the notes say what is cut, and what every process holds whole."""
        assert options.ranks is not None
        cut = _Cut(copy_graph_module(program.body), options.ranks)
        sites = cut.attentions(program)
        cut.channels()
        body = cut.finished()
        head = None if program.head is None else _head(program.head, options.ranks)
        return program.evolve(cut.note(), body=body, head=head, sites=sites, ranks=options.ranks)


@dataclass(frozen=True)
class Heads:
    """Which heads of a site a process has. kv: KV heads. query: query heads, those that read them. own: of these, places of those whose
    output it adds to the sum: where processes share a KV head, each has some."""

    kv: Index
    query: Index
    own: Index


def heads_of(site: AttentionSite, ranks: Ranks) -> Heads:
    """Runs of KV heads; where there are fewer of them than processes, neighbours share one and its choices, and split its queries."""
    group = site.group_size
    if ranks.size <= site.kv_heads:
        kv = tuple(ranks.part(site.kv_heads))
        query = tuple(head * group + i for head in kv for i in range(group))
        return Heads(kv, query, tuple(range(len(query))))
    head = ranks.rank * site.kv_heads // ranks.size
    sharing = [rank for rank in range(ranks.size) if rank * site.kv_heads // ranks.size == head]
    place, count = sharing.index(ranks.rank), len(sharing)
    own = tuple(range(group * place // count, group * (place + 1) // count))
    return Heads((head,), tuple(head * group + i for i in range(group)), own)


@dataclass(eq=False)
class _Cut:
    body: GraphModule
    ranks: Ranks
    counts: Counter[str] = field(default_factory=Counter)
    whole: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = self.body.graph
        self.parts = Parts(self.body, NAME)

    # -- attention -----------------------------------------------------------------------------------------------------

    def attentions(self, program: Program) -> tuple[AttentionSite, ...]:
        nodes = dict(zip((site.index for site in program.sites), attention_nodes(self.graph), strict=True))
        sites = []
        for site in program.sites:
            heads = heads_of(site, self.ranks)
            local = self._attention(nodes[site.index], heads)
            if not self._rows_behind(nodes[site.index], site, heads):
                self._joined(nodes[site.index], local, site, heads)
            order = site.head_order or tuple(range(site.kv_heads))
            sites.append(
                replace(
                    site,
                    q_heads=len(heads.query),
                    kv_heads=len(heads.kv),
                    head_order=tuple(order[head] for head in heads.kv),
                    roles=tuple(site.roles[head] for head in heads.kv) if site.roles else (),
                )
            )
        return tuple(sites)

    def _attention(self, node: Node, heads: Heads) -> Node:
        """The attention of this process's heads, behind `node`."""
        operands = [self._operand(node.args[0], 1, heads.query)]
        operands += [self._operand(x, 1, heads.kv) for x in node.args[1:3]]
        extras: dict[str, Any] = dict(node.kwargs)
        rest = list(node.args[3:])
        for place, name in ((4, "sinks"), (5, "bias_slopes"), (6, "bias_table")):
            value = node.args[place] if len(node.args) > place else extras.get(name)
            if isinstance(value, Node):
                own = self.parts.part(value, 0, heads.query)
                if len(node.args) > place:
                    rest[place - 3] = own
                else:
                    extras[name] = own
        with self.graph.inserting_before(node.next):
            local = emit(self.graph, attention, (*operands, *rest), extras, like=node, by=NAME)
        self.parts.given[node] = (1, heads.query, local)
        return local

    def _operand(self, node: Node, axis: int, index: Index) -> Node:
        self.parts.begin()
        new = self.parts.part(node, axis, index)
        for place in dict.fromkeys(self.parts.cut):
            self._say(place, "made whole and its heads taken")
        return new

    def _rows_behind(self, node: Node, site: AttentionSite, heads: Heads) -> bool:
        """Whether the product that reads the attention's output sums over this process's heads."""
        own = tuple(heads.query[place] for place in heads.own)
        index = tuple(head * site.value_dim + i for head in own for i in range(site.value_dim))
        product = _product_behind(node, site.q_heads * site.value_dim)
        return product is not None and self._summed(product, index, "row")

    def _joined(self, node: Node, local: Node, site: AttentionSite, heads: Heads) -> None:
        """Every process gets all heads of the output: each puts its own into zeros, and they are added up, which is exact."""
        self._say(node, "its output is joined, as what reads it is no product over heads alone")
        own = tuple(heads.query[place] for place in heads.own)
        with self.graph.inserting_before(local.next):
            places = self.parts.constant(own)
        mine = local if len(heads.own) == len(heads.query) else self.parts.taken(local, 1, heads.own)
        behind = max(places, mine, key=lambda x: x._sort_key)
        with self.graph.inserting_before(behind.next):
            full = emit(self.graph, aten.new_zeros.default, (mine, _sizes(self.graph, mine, 1, site.q_heads)), {}, like=node, by=NAME)
        with self.graph.inserting_before(full.next):
            put = emit(self.graph, aten.index_copy.default, (full, 1, places, mine), like=node, by=NAME)
        result = self._reduced(put, node)
        node.replace_all_uses_with(result)
        self.parts.made.clear()

    # -- channels ------------------------------------------------------------------------------------------------------

    def channels(self) -> None:
        """Products over channels that are made one by one by other products: an MLP's, an expert's."""
        for node in list(self.graph.nodes):
            if not _is_product(node) or _is_dead(node) or node.meta.get("origin", "").endswith(NAME):
                continue
            width = (shape_of(_input_of(node)) or (None,))[-1]
            if isinstance(width, int) and width >= self.ranks.size:
                self._summed(node, tuple(self.ranks.part(width)), "channels")

    def _summed(self, product: Node, index: Index, kind: str) -> bool:
        """Let `product` sum over `index` of its input's last axis only, and add up what the processes have; False where the input is not
        made of parts there, or something else reads it."""
        x = _input_of(product)
        if not isinstance(x, Node) or not _weight_is_stored(product):
            return False
        self.parts.begin()
        own = self.parts.part(x, -1, index)
        touched, made_of = self.parts.touched, [node for node in self.parts.touched if _is_product(node) or node in self.parts.given]
        if self.parts.cut or not made_of or any(self._read_elsewhere(node, touched, product) for node in touched if node.op != "get_attr"):
            return False
        with self.graph.inserting_before(product.next):
            partial, bias = self._partial(product, own, index)
        copied = self._reduced(partial, product)
        if bias is not None:
            with self.graph.inserting_before(copied.next):
                copied = emit(self.graph, aten.add.Tensor, (copied, bias), like=product, by=NAME)
        product.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not partial)
        self.counts[kind] += 1
        return True

    def _read_elsewhere(self, node: Node, touched: set[Node], product: Node) -> bool:
        return not all(user in touched or user is product or _is_dead(user) for user in node.users)

    def _partial(self, product: Node, x: Node, index: Index) -> tuple[Node, Node | None]:
        """The product over `index` alone, without its bias, which is added once."""
        target, args = product.target, product.args
        if target in (aten.linear.default, linear):
            weight = self.parts.part(args[1], 1, index)
            bias = args[2] if len(args) > 2 else None
            made, args = aten.linear.default, (x, weight)
        elif target == aten.addmm.default:
            bias, made = args[0], aten.mm.default
            args = (x, self.parts.part(args[2], 0, index))
        elif is_grouped(target):
            bias, made = None, target
            args = (x, self.parts.part(args[1], 1, index), *args[2:])
        else:
            weight = args[1]
            bias, made = None, target
            args = (x, self.parts.part(weight, len(shape_of(weight) or ()) - 2, index))
        behind = max((product, *(a for a in args if isinstance(a, Node))), key=lambda n: n._sort_key)
        with self.graph.inserting_before(behind.next):
            new = self.graph.call_function(made, args, dict(product.kwargs) if is_grouped(target) else {})
        new.meta = {**product.meta, "origin": f"{module_path(product) or 'model'}: {NAME}"}
        return new, bias

    def _reduced(self, partial: Node, like: Node) -> Node:
        with self.graph.inserting_before(partial.next):
            sent = self.graph.call_function(collectives.all_reduce.default, (partial, "sum", self.ranks.group))
        with self.graph.inserting_before(sent.next):
            result = self.graph.call_function(collectives.wait_tensor.default, (sent,))
        for node in (sent, result):
            node.meta = {**like.meta, "origin": f"{module_path(like) or 'model'}: {NAME}"}
        self.counts["all-reduces"] += 1
        return result

    def _say(self, node: Node, what: str) -> None:
        self.whole.append(f"{describe(node)} is {what}" if what.startswith("made") else f"{describe(node)}: {what}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def finished(self) -> GraphModule:
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output") and not node.is_impure():
                self.graph.erase_node(node)
        self.parts.store()
        return copy_graph_module(finish(self.body))

    def note(self) -> str:
        ranks = self.ranks
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        whole = "".join(f"; {line}" for line in dict.fromkeys(self.whole))
        return f"{NAME}: rank {ranks.rank} of {ranks.size}: {counted}{whole}"


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and (node.target in PRODUCTS or is_grouped(node.target))


def _input_of(product: Node) -> Any:
    return product.args[1] if product.target == aten.addmm.default else product.args[0]


def _weight_is_stored(product: Node) -> bool:
    """Whether the second operand of a product is a stored tensor, or a view of one."""
    weight = product.args[2] if product.target == aten.addmm.default else product.args[1]
    while isinstance(weight, Node) and weight.op == "call_function" and len(weight.all_input_nodes) == 1:
        weight = weight.all_input_nodes[0]
    return isinstance(weight, Node) and weight.op == "get_attr"


def _is_dead(node: Node) -> bool:
    """Whether nothing reads the node, nor any that read it."""
    return node.op == "call_function" and not node.is_impure() and all(_is_dead(user) for user in node.users)


def _product_behind(node: Node, width: int) -> Node | None:
    """The product whose input's last axis is an attention's output: all heads, one behind the other."""
    waiting, seen = list(node.users), set()
    while waiting:
        user = waiting.pop(0)
        if user in seen or user.meta.get("origin", "").endswith(NAME):
            continue
        seen.add(user)
        if _is_product(user):
            shape = shape_of(_input_of(user))
            if shape and shape[-1] == width:
                return user
            continue
        if len(seen) < 24:
            waiting.extend(user.users)
    return None


def _sizes(graph: Any, like: Node, axis: int, size: int) -> list[Any]:
    """The sizes of `like`, [B, H, T, D], with `size` along `axis`; made at the graph's insertion point."""
    sizes: list[Any] = []
    for place, known in enumerate(shape_of(like) or ()):
        if place == axis:
            sizes.append(size)
        elif isinstance(known, int):
            sizes.append(known)
        else:
            sizes.append(emit(graph, aten.sym_size.int, (like, place), like=like, by=NAME))
    return sizes


def _head(head: GraphModule, ranks: Ranks) -> GraphModule:
    return head


__all__ = ["Heads", "ShardHeads", "heads_of", "output_value", "resized"]
