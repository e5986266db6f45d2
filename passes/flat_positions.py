"""Lift positions of several rows through code that only knows one row.

`outer` takes vectors, a view names the length: such code cannot be given [B, T] positions. It can be given the
positions of all rows as one row of B * T, because it treats places by themselves; what it makes is cut into rows
afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from semkv.ir.graph import copy_graph_module, finish, placeholders, shape_of
from semkv.passes.position_sources import Observed, Source, find_frontier, token_axes

aten = torch.ops.aten


def lift_flat(body: GraphModule, sources: list[Source], observed: Observed) -> GraphModule | None:
    """A copy of the body whose values per place are made for B * T positions; None where rows do not fit a reader."""
    module = copy_graph_module(body)
    graph = module.graph
    twins = dict(zip(body.graph.nodes, graph.nodes))
    positions = placeholders(graph)["positions"]
    builder = _FlatValues(graph, positions, {source.node: source for source in sources}, observed, twins)
    for node in find_frontier(body, observed):
        readers = [user for user in node.users if user not in observed.short]
        for reader in readers:
            with graph.inserting_before(twins[reader]):
                value = builder.rows_of(node, reader)
            if value is None:
                return None
            twins[reader].replace_input_with(twins[node], value)
    return finish(module)


class _FlatValues:
    """Recomputes values that depend on sizes alone, with one row of B * T places."""

    def __init__(
        self,
        graph: Graph,
        positions: Node,
        sources: dict[Node, Source],
        observed: Observed,
        twins: dict[Node, Node],
    ) -> None:
        self.graph, self.positions, self.sources, self.observed, self.twins = graph, positions, sources, observed, twins

    def rows_of(self, node: Node, reader: Node) -> Node | None:
        """The node's value for rows of positions, in a shape that its reader broadcasts; None where there is none."""
        rank = len(shape_of(reader) or ())
        (axis,) = token_axes(node, self.observed)
        shape = list(self.observed.short[node].shape)
        self.flat = self.graph.call_function(aten.reshape.default, (self.positions, [-1]))
        self.made: dict[Node, Any] = {}
        value = self._value(node)
        batch = self.graph.call_function(aten.sym_size.int, (self.positions, 0))
        length = self.graph.call_function(aten.sym_size.int, (self.positions, 1))
        value = self.graph.call_function(
            aten.reshape.default, (value, [*shape[:axis], batch, length, *shape[axis + 1 :]])
        )
        value = self.graph.call_function(aten.movedim.int, (value, axis, 0))
        if axis > 0 and shape[0] == 1 and len(shape) == rank:
            return self.graph.call_function(aten.squeeze.dim, (value, 1))
        for _ in range(rank - len(shape) - 1):
            value = self.graph.call_function(aten.unsqueeze.default, (value, 1))
        return value if rank > len(shape) else None

    def _value(self, node: Node) -> Any:
        """The twin of a node that does not depend on the length, else the node made anew."""
        if node in self.made:
            return self.made[node]
        if node in self.sources:
            made = self._source(self.sources[node])
        elif not self._depends_on_length(node):
            made = self.twins[node]
        elif node.target == aten.sym_size.int:
            made = self.graph.call_function(aten.sym_numel.default, (self.positions,))
        else:
            args, kwargs = torch.fx.map_arg(node.args, self._value), torch.fx.map_arg(node.kwargs, self._value)
            made = self.graph.call_function(node.target, args, kwargs)
        self.made[node] = made
        return made

    def _depends_on_length(self, node: Node) -> bool:
        short, long = self.observed.short[node], self.observed.long[node]
        if isinstance(short, (Tensor, tuple, list)):
            return self.observed.follows_length(node)
        return short != long

    def _source(self, source: Source) -> Node:
        index = self.flat
        if source.offset:
            index = self.graph.call_function(aten.add.Tensor, (index, source.offset))
        if source.table is not None:
            table = self.twins[source.table]
            return self.graph.call_function(aten.index_select.default, (table, source.axis, index))
        dtype = self.observed.short[source.node].dtype
        if dtype != torch.int64:
            index = self.graph.call_function(aten._to_copy.default, (index,), {"dtype": dtype})
        return self.graph.call_function(aten.reshape.default, (index, list(source.shape)))
