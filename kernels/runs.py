"""Runs of nodes of a graph as single calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

LEAST = 2
"""Nodes of a run that is worth a call."""


def join_runs(
    module: GraphModule, joins: Callable[[Node], bool], made: Callable[[GraphModule], Callable[..., tuple[Any, ...]]]
) -> GraphModule:
    """A graph that computes the same with the same parameters; its runs of nodes that `joins` accepts are calls of what `made` makes of
    them.

    `made` is given a run as a graph of its own: placeholders are its inputs, `get_attr` its weights, and it returns a tuple. The result is
    for this process: it cannot be saved.
    """
    return _Joining(module, joins, made).joined()


class _Joining:
    """One walk over the nodes of a graph. The run goes on past nodes that do not need it; it is called before the first that does."""

    def __init__(self, module: GraphModule, joins: Callable[[Node], bool], made: Callable[..., Any]) -> None:
        self.module, self.graph, self.joins, self.made = module, Graph(), joins, made
        self.copies: dict[Node, Node] = {}
        self.run: list[Node] = []
        self.count = 0

    def joined(self) -> GraphModule:
        for node in self.module.graph.nodes:
            if self._belongs(node):
                self.run.append(node)
            elif node.op != "get_attr":  # copied where something needs it
                if any(source in self.run for source in node.all_input_nodes):
                    self._close()
                self._copy(node)
        return GraphModule(self.module, self.graph, class_name=type(self.module).__name__)

    def _belongs(self, node: Node) -> bool:
        if node.target in (operator.getitem, torch.ops.aten.sym_size.int):
            return node.args[0] in self.run
        return self.joins(node)

    def _copy(self, node: Node) -> Node:
        if node not in self.copies:
            self.copies[node] = self.graph.node_copy(node, self._copy)
        return self.copies[node]

    def _close(self) -> None:
        """Put a call in the place of the run, or copy its nodes where they are few."""
        run, self.run = self.run, []
        if len(run) < LEAST:
            for node in run:
                self._copy(node)
            return
        inside, own = Graph(), {}
        inputs = [node for node in dict.fromkeys(x for node in run for x in node.all_input_nodes) if node not in run]
        given = [node for node in inputs if node.op != "get_attr"]
        for node in given:
            own[node] = inside.placeholder(node.name)
        for node in inputs:
            if node.op == "get_attr":
                own[node] = inside.node_copy(node)
        for node in run:
            own[node] = inside.node_copy(node, own.__getitem__)
        returned = [node for node in run if any(user not in own for user in node.users)]
        inside.output(tuple(own[node] for node in returned))
        computed = self.made(GraphModule(self.module, inside))

        def call(*values: Any) -> tuple[Any, ...]:
            return computed(*values)

        call.__name__ = f"run_{self.count}"
        self.count += 1
        made = self.graph.call_function(call, tuple(self._copy(node) for node in given))
        for place, node in enumerate(returned):
            self.copies[node] = self.graph.call_function(operator.getitem, (made, place))


__all__ = ["join_runs"]
