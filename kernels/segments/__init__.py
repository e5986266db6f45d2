"""What a decode step computes between two attentions, in one call of C++ where there is a compiler.

A step streams weights and entries through the caches, so that what comes between, dozens of small operators, finds neither its code nor
its tables in them: one after the other they take longer than their numbers. `fuse` takes runs of nodes out of a graph; each becomes
a list of instructions (`instructions.py`) that one function goes through (`template.cpp`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from semkv.kernels.segments.cpp import Segment, segments_library
from semkv.kernels.segments.instructions import is_supported

LEAST = 2
"""Nodes of a run that is worth a call."""


def fuse(module: GraphModule) -> GraphModule:
    """A graph that computes the same with the same parameters; its runs of supported nodes are calls of a `Segment`.

    It is for steps of few tokens, and for this process: it cannot be saved.
    """
    return _Fusion(module).made()


class _Fusion:
    """One walk over the nodes of a graph. The run goes on past nodes that do not need it; it is called before the first that does."""

    def __init__(self, module: GraphModule) -> None:
        self.module, self.graph = module, Graph()
        self.copies: dict[Node, Node] = {}
        self.run: list[Node] = []
        self.count = 0

    def made(self) -> GraphModule:
        for node in self.module.graph.nodes:
            if self._joins(node):
                self.run.append(node)
            elif node.op != "get_attr":  # copied where something needs it
                if any(source in self.run for source in node.all_input_nodes):
                    self._close()
                self._copy(node)
        return GraphModule(self.module, self.graph, class_name=type(self.module).__name__)

    def _joins(self, node: Node) -> bool:
        if node.target in (operator.getitem, torch.ops.aten.sym_size.int):
            return node.args[0] in self.run
        return is_supported(node)

    def _copy(self, node: Node) -> Node:
        if node not in self.copies:
            self.copies[node] = self.graph.node_copy(node, self._copy)
        return self.copies[node]

    def _close(self) -> None:
        """Call the run's segment, or copy its nodes where they are few."""
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
        segment = Segment(GraphModule(self.module, inside))

        def call(*values: Any) -> tuple[Any, ...]:
            return segment(*values)

        call.__name__ = f"segment_{self.count}"
        self.count += 1
        made = self.graph.call_function(call, tuple(self._copy(node) for node in given))
        for place, node in enumerate(returned):
            self.copies[node] = self.graph.call_function(operator.getitem, (made, place))


__all__ = ["Segment", "fuse", "segments_library"]
