"""Tensor parallelism: each process has some KV heads with their projections, some channels of every MLP and expert, some of the vocabulary.

Nothing is known by a model's name. An attention needs its process's heads of queries, keys and values only, so what makes them is cut back
to the weights (`semkv.passes.parts_of_nodes`): rows of projections, whatever lies between. Where a product sums over channels that are made
that way, each process sums over its own, and one all-reduce adds the sums up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import (
    ancestors,
    attention_nodes,
    copy_graph_module,
    describe,
    finish,
    module_path,
    output_value,
    placeholders,
    shape_of,
)
from semkv.ir.ops import attention, linear
from semkv.ir.program import Program
from semkv.ir.ranks import Among, Ranks, collectives
from semkv.ir.seams import Seams
from semkv.ir.site import AttentionSite
from semkv.passes.base import Pass, PassOptions
from semkv.passes.dealt_heads import dealt_heads
from semkv.passes.graph_utils import emit
from semkv.passes.parts_of_nodes import VIEWS, Index, Parts, is_grouped, is_pointwise

aten = torch.ops.aten
NAME = "shard_heads"
NAMED = 4
"""Weights that a note names."""
PRODUCTS = frozenset(
    {aten.linear.default, linear, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default}
)


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
        cut = Cut(copy_graph_module(program.body), options.ranks)
        sites = cut.attentions(program, dealt_heads(program.stores, options.head_nbytes or {}, options.ranks))
        cut.norms()
        cut.channels()
        cut.vocabulary()
        body, head = cut.finished(), program.head
        if head is not None:
            behind = Cut(copy_graph_module(head), options.ranks, counts=cut.counts)
            behind.parts.stored = cut.parts.stored
            behind.logits()
            head = behind.finished()
        made = program.evolve(body=body, head=head, sites=sites, ranks=options.ranks, seams=cut.renamed(program.seams))
        return made.evolve(cut.note(program, made))


@dataclass(frozen=True)
class Heads:
    """Which heads of a site a process has. kv: KV heads. query: query heads, those that read them. own: of these, places of those whose
    output it adds to the sum: where `sharers` processes have the same KV head, each has some."""

    kv: Index
    query: Index
    own: Index
    sharers: int = 1


def heads_of(site: AttentionSite, ranks: Ranks, parts: Sequence[Index] = ()) -> Heads:
    """Those of `parts`, KV heads by process, or runs of KV heads; where there are fewer of them than processes, neighbours share one and
    its choices, and split its queries."""
    group = site.group_size
    if ranks.size <= site.kv_heads:
        kv = parts[ranks.rank] if parts else tuple(ranks.part(site.kv_heads))
        query = tuple(head * group + i for head in kv for i in range(group))
        return Heads(kv, query, tuple(range(len(query))))
    head = ranks.rank * site.kv_heads // ranks.size
    sharing = [rank for rank in range(ranks.size) if rank * site.kv_heads // ranks.size == head]
    place, count = sharing.index(ranks.rank), len(sharing)
    own = tuple(range(group * place // count, group * (place + 1) // count))
    return Heads((head,), tuple(head * group + i for i in range(group)), own, count)


@dataclass(eq=False)
class Cut:
    """A program's graph as one of `ranks` has it, changed in place. counts, whole: what was cut, and weights that all have, by name. names:
    nodes that were replaced, and by which."""

    body: GraphModule
    ranks: Ranks
    counts: Counter[str] = field(default_factory=Counter)
    whole: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.body.graph
        self.parts = Parts(self.body, NAME)
        self.shared_out: set[tuple[Node, int]] = set()
        self._dead: set[Node] = set()
        self._dead_when = (0, 0)

    @property
    def dead(self) -> set[Node]:
        """Nodes that nothing reads, nor any that read them."""
        now = (len(self.graph.nodes), len(self.names))
        if now != self._dead_when:
            self._dead, self._dead_when = set(), now
            for node in reversed(self.graph.nodes):
                if (
                    node.op == "call_function"
                    and all(user in self._dead for user in node.users)
                    and not node.is_impure()
                ):
                    self._dead.add(node)
        return self._dead

    # -- attention -----------------------------------------------------------------------------------------------------

    def attentions(self, program: Program, dealt: Mapping[int, Sequence[Index]]) -> tuple[AttentionSite, ...]:
        """Sites of this process's heads. dealt: by store, the KV heads of each process, where they are no runs."""
        nodes = dict(zip((site.index for site in program.sites), attention_nodes(self.graph), strict=True))
        sites = []
        for site in program.sites:
            all_of = [
                heads_of(site, replace(self.ranks, rank=rank), dealt.get(site.store, ()))
                for rank in range(self.ranks.size)
            ]
            heads = all_of[self.ranks.rank]
            apart = all(len(each.own) == len(each.query) for each in all_of)  # the same in all: what they exchange is
            local = self._attention(nodes[site.index], heads, apart)
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
                    among=Among(
                        self.ranks,
                        tuple(each.kv for each in all_of),
                        heads.kv,
                        heads.query,
                        site.kv_heads,
                        heads.sharers,
                        site.head_order,
                    ),
                )
            )
        return tuple(sites)

    def _attention(self, node: Node, heads: Heads, apart: bool) -> Node:
        """The attention of this process's heads, behind `node`. apart: no two processes share a head."""
        operands = [self._operand(node.args[0], 1, heads.query, apart)]
        operands += [self._operand(x, 1, heads.kv, apart) for x in node.args[1:3]]
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

    def _operand(self, node: Node, axis: int, index: Index, apart: bool) -> Node:
        self.parts.begin()
        new = self.parts.part(node, axis, index)
        if apart:
            self.shared_out |= {(x, len(shape_of(x) or ()) - 1) for x in self.parts.touched if _is_product(x)}
        for place in dict.fromkeys(self.parts.cut):
            self._say(place, "is made whole, and its heads are taken")
        return new

    def _rows_behind(self, node: Node, site: AttentionSite, heads: Heads) -> bool:
        """Whether the product that reads the attention's output sums over this process's heads."""
        own = tuple(heads.query[place] for place in heads.own)
        index = tuple(head * site.value_dim + i for head in own for i in range(site.value_dim))
        product = _product_behind(node, site.q_heads * site.value_dim)
        return product is not None and self._summed(product, index, "row")

    def _joined(self, node: Node, local: Node, site: AttentionSite, heads: Heads) -> None:
        """Every process gets all heads of the output: each puts its own into zeros, and they are added up, which is exact."""
        self._say(node, "is joined, as what reads it is no product over heads alone")
        own = tuple(heads.query[place] for place in heads.own)
        mine = local if len(heads.own) == len(heads.query) else self.parts.taken(local, 1, heads.own)
        self._together(node, mine, 1, own, site.q_heads)

    def _together(self, node: Node, mine: Node, axis: int, index: Index, size: int) -> None:
        """Let all that reads `node` read what the parts of all processes make, of which `mine` is that at `index`."""
        with self.graph.inserting_before(mine.next):
            places = self.parts.constant(index)
            places.meta["val"] = mine.meta["val"].new_empty((len(index),), dtype=torch.int64)
            sizes = _sizes(self.graph, mine, axis, size)
            full = emit(self.graph, aten.new_zeros.default, (mine, sizes), like=node, by=NAME)
            put = emit(self.graph, aten.index_copy.default, (full, axis, places, mine), like=node, by=NAME)
        self._instead(node, self._reduced(put, node))

    def _instead(self, node: Node, new: Node) -> None:
        """Let what reads `node` read `new`, but for what `new` itself is made of."""
        own = ancestors([new])
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in own)
        self.names[node.name] = new.name

    def renamed(self, seams: Seams) -> Seams:
        """The places at which nodes were replaced."""
        new = self.names
        streams = tuple((site, new.get(name, name)) for site, name in seams.streams)
        return replace(seams, embeddings=new.get(seams.embeddings, seams.embeddings), streams=streams)

    # -- channels ------------------------------------------------------------------------------------------------------

    def channels(self) -> None:
        """Products over channels that are made one by one by other products: an MLP's, an expert's."""
        for node in list(self.graph.nodes):
            if not _is_product(node) or node in self.dead or node.meta.get("origin", "").endswith(NAME):
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
        touched, made_of = (
            self.parts.touched,
            [node for node in self.parts.touched if _is_product(node) or node in self.parts.given],
        )
        if (
            self.parts.cut
            or not made_of
            or any(self._read_elsewhere(node, touched, product) for node in touched if node.op != "get_attr")
        ):
            return False
        with self.graph.inserting_before(product.next):
            partial, bias = self._partial(product, own, index)
        last = product if bias is not None else self._last_of_sum(product)
        if last is product:
            added = self._reduced(partial, product)
        else:  # what follows is a sum over the experts of a token: behind it there is less to send
            product.replace_all_uses_with(partial)
            added = self._reduced(last, last)
        sent = added
        if bias is not None:
            with self.graph.inserting_before(sent.next):
                added = emit(self.graph, aten.add.Tensor, (sent, bias), like=product, by=NAME)
        self._instead(last, added)
        self.counts[kind] += 1
        return True

    def _last_of_sum(self, product: Node) -> Node:
        """The sum over a token's experts that alone reads what they make, by operators to which it makes no difference; else the
        product."""
        node, last = product, product
        while True:
            users = [user for user in node.users if user not in self.dead]
            if (
                len(users) != 1
                or users[0].target not in SCALED
                or users[0].args[0] is not node
                or node in users[0].args[1:]
            ):
                return last
            (node,) = users
            if node.target in SUMS:
                last = node

    def _read_elsewhere(self, node: Node, touched: set[Node], product: Node) -> bool:
        return not all(user in touched or user is product or user in self.dead for user in node.users)

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

    # -- norms over all heads ------------------------------------------------------------------------------------------

    def norms(self) -> None:
        """Sums and means over a projection of which attention reads a part: each process sums over its part."""
        parts = {(node, axis): index for node, axis, index in self.parts.made if _is_product(node)}
        for node in list(self.graph.nodes):
            if node.target not in (aten.mean.dim, aten.sum.dim_IntList) or node in self.dead:
                continue
            source, (dim, *others) = node.args[0], node.args[1] or (0, 0)
            shape = shape_of(source) or (None,)
            width, last = shape[-1], len(shape) - 1
            product = _alone_behind(source)
            index = parts.get((product, last)) if product is not None and dim in (-1, last) and not others else None
            if index is None or not self._apart(product, last, width):
                continue
            self.parts.begin()
            own = self.parts.part(source, last, index)
            if self.parts.cut:
                continue
            with self.graph.inserting_before(max(node, own, key=lambda x: x._sort_key).next):
                total = emit(
                    self.graph, aten.sum.dim_IntList, (own, *node.args[1:]), dict(node.kwargs), like=node, by=NAME
                )
            added = self._reduced(total, node)
            if node.target == aten.mean.dim:
                with self.graph.inserting_before(added.next):
                    added = emit(self.graph, aten.div.Tensor, (added, float(width)), like=node, by=NAME)
            self._instead(node, added)
            self.counts["norms"] += 1

    def _apart(self, product: Node | None, axis: int, width: Any) -> bool:
        """Whether the processes' parts of a projection are apart and together all of it: heads that none of them shares."""
        return isinstance(width, int) and (product, axis) in self.shared_out

    # -- vocabulary ----------------------------------------------------------------------------------------------------

    def vocabulary(self) -> None:
        """Each process has the embeddings of some ids, and zeros for all others; they are added up, which is exact."""
        ids = placeholders(self.graph)["input_ids"]
        for node in list(self.graph.nodes):
            if (
                node.target != aten.embedding.default
                or node.args[1] is not ids
                or node.args[0].op != "get_attr"
                or node in self.dead
            ):
                continue
            rows = (shape_of(node.args[0]) or (None,))[0]
            if not isinstance(rows, int) or rows < self.ranks.size:
                continue
            own = self.ranks.part(rows)
            self.parts.begin()
            table = self.parts.part(node.args[0], 0, tuple(own))
            with self.graph.inserting_before(node.next):
                place = emit(self.graph, aten.sub.Tensor, (ids, own.start), like=node, by=NAME)
                before = emit(self.graph, aten.lt.Scalar, (place, 0), like=node, by=NAME)
                behind = emit(self.graph, aten.ge.Scalar, (place, len(own)), like=node, by=NAME)
                outside = emit(self.graph, aten.logical_or.default, (before, behind), like=node, by=NAME)
                inside = emit(self.graph, aten.clamp.default, (place, 0, len(own) - 1), like=node, by=NAME)
                found = emit(self.graph, aten.embedding.default, (table, inside), like=node, by=NAME)
                mask = emit(self.graph, aten.unsqueeze.default, (outside, -1), like=node, by=NAME)
                found = emit(self.graph, aten.masked_fill.Scalar, (found, mask, 0.0), like=node, by=NAME)
            self._instead(node, self._reduced(found, node))
            self.counts["vocabulary"] += 1

    def logits(self) -> None:
        """Each process makes the logits of some ids."""
        result = output_value(self.graph)
        shape = shape_of(result)
        if result.op == "placeholder" or shape is None or not isinstance(shape[-1], int) or shape[-1] < self.ranks.size:
            return
        own = tuple(self.ranks.part(shape[-1]))
        self.parts.begin()
        part = self.parts.part(result, -1, own)
        if not self.parts.cut and any(_is_product(node) for node in self.parts.touched):
            self._together(result, part, len(shape) - 1, own, shape[-1])
            self.counts["vocabulary"] += 1

    # -- the end -------------------------------------------------------------------------------------------------------

    def _say(self, node: Node, what: str) -> None:
        self.whole.append(f"{describe(node)} {what}")

    def finished(self) -> GraphModule:
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output") and not node.is_impure():
                self.graph.erase_node(node)
        self.parts.store()
        return copy_graph_module(finish(self.body))

    def note(self, before: Program, after: Program) -> str:
        """What this process has, and what every process has whole."""
        own, whole = weights_of(after), weights_of(before)
        shared = [name for name, x in own.items() if x.dim() > 1 and name in whole and whole[name] is x]
        sizes = [sum(x.numel() for x in {id(x): x for x in each.values()}.values()) for each in (own, whole)]
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        note = f"{NAME}: rank {self.ranks.rank} of {self.ranks.size} holds {sizes[0] / max(1, sizes[1]):.3f} of the weights: {counted}"
        if shared:
            note += f"; whole in every process: {', '.join(shared[:NAMED])}"
            note += f" and {len(shared) - NAMED} more" if len(shared) > NAMED else ""
        return note + "".join(f"; {line}" for line in dict.fromkeys(self.whole))


def weights_of(program: Program) -> dict[str, Tensor]:
    """The parameters of body and head, by name."""
    modules = (program.body, program.head)
    return {
        name: x
        for module in modules
        if module is not None
        for name, x in module.named_parameters(remove_duplicate=False)
    }


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


def _alone_behind(node: Node) -> Node | None:
    """The product that a value is made of by operators on single numbers alone; None where there is another way."""
    while node.op == "call_function" and is_pointwise(node.target):
        made_of = [x for x in node.all_input_nodes if shape_of(x)]
        if len(made_of) != 1:
            return None
        (node,) = made_of
    return node if _is_product(node) else None


SUMS = frozenset({aten.sum.dim_IntList})
SCALED = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.unsqueeze.default, aten.index.Tensor, *VIEWS, *SUMS})
"""Operators to which a sum of parts may be added up behind them as well."""


__all__ = ["Heads", "ShardHeads", "heads_of", "weights_of"]
