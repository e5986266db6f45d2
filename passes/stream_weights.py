"""Let the projections of a decode step read their weights as fast as memory allows."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from semkv.ir.graph import copy_graph_module, finish
from semkv.ir.ops import linear
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions


class StreamWeights(Pass):
    """`aten::linear` becomes `semkv::linear` in `decode` and in the head, where one token's products wait for their weights."""

    name = "stream_weights"
    needs = "lowered"
    leaves = "lowered"
    after = ("lower_kernels",)

    def run(self, program: Program, options: PassOptions) -> Program:
        """The two graphs with the other operator, which computes the same; parameters stay the user's own."""
        decode, head = (copy_graph_module(module) for module in (program.decode, program.head) if module)
        count = sum(_replace(module) for module in (decode, head))
        return program.evolve(f"{self.name}: {count} projections", decode=finish(decode), head=finish(head))


def _replace(module: GraphModule) -> int:
    """Change the operator in place; how often."""
    found = [node for node in module.graph.nodes if node.target == torch.ops.aten.linear.default]
    for node in found:
        node.target = linear
    return len(found)
