"""Let the memory say what stands at a prompt's positions besides ids, where `Program.seams` has found that it enters."""

from __future__ import annotations

from torch.fx import GraphModule

from semkv.ir import memory
from semkv.ir.graph import copy_graph_module, finish, placeholders
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions


class OpenSeams(Pass):
    """Calls of `semkv.memory.embedded` and `entering` in prefill and extend; of `rotary`, where positions have several axes, in decode too.

    A decode step of any other model stays as it was: a token that is generated is an id.
    """

    name = "open_seams"
    needs = "lowered"
    leaves = "lowered"
    after = ("rewrite_attention", "insert_retrieval_head")

    def applies(self, program: Program, options: PassOptions) -> bool:
        return bool(program.seams.embeddings or program.seams.rotary)

    def run(self, program: Program, options: PassOptions) -> Program:
        """The three lowered graphs with the calls."""
        graphs = {"prefill": program.prefill, "extend": program.extend, "decode": program.decode}
        changes = {
            name: _opened(program, module, rotary_only=name == "decode")
            for name, module in graphs.items()
            if module is not None and (name != "decode" or program.seams.rotary)
        }
        return program.evolve(f"{self.name}: {', '.join(changes)} ask what a prompt brings besides ids", **changes)


def _opened(program: Program, module: GraphModule, *, rotary_only: bool = False) -> GraphModule:
    module = copy_graph_module(module)
    graph, seams = module.graph, program.seams
    inputs, nodes = placeholders(graph), {node.name: node for node in graph.nodes}
    if seams.rotary:
        node = nodes[seams.rotary]
        with graph.inserting_before(node):
            made = graph.call_function(memory.rotary, (inputs["memory"], inputs["positions"], seams.axes))
        made.meta = {**node.meta, "semkv_pass": OpenSeams.name}
        node.replace_all_uses_with(made)
    if not rotary_only and seams.embeddings:
        places = [((memory.entering, site), name) for site, name in seams.streams if name != seams.embeddings]
        for (function, *more), name in [((memory.embedded,), seams.embeddings), *places]:
            node = nodes[name]
            with graph.inserting_after(node):
                made = graph.call_function(function, (inputs["memory"], *more, node))
            made.meta = {**node.meta, "semkv_pass": OpenSeams.name}
            node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    return finish(module)
