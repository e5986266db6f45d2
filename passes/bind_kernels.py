"""Say at each attention of a step which kernels may answer it, and how their work is laid out."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from semkv.ir.graph import copy_graph_module, finish
from semkv.ir.ops import mixed_attention
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions

BOUND = ("kernel", "layout")
"""Arguments of `semkv::mixed_attention` that this pass writes; they change nothing computed but its rounding."""


class BindKernels(Pass):
    """Write `PassOptions.kernels` and `layouts` into the calls of `extend` and `decode`; defaults are left unsaid."""

    name = "bind_kernels"
    needs = "lowered"
    leaves = "lowered"
    after = ("lower_kernels",)

    def applies(self, program: Program, options: PassOptions) -> bool:
        return any(
            _said(node) != _wanted(node, options)
            for module in (program.extend, program.decode)
            for node in _calls(module)
        )

    def run(self, program: Program, options: PassOptions) -> Program:
        """The two graphs with other arguments; what was bound for another device goes."""
        extend, decode = (copy_graph_module(module) for module in (program.extend, program.decode) if module)
        for module in (extend, decode):
            for node in _calls(module):
                kept = {name: value for name, value in node.kwargs.items() if name not in BOUND}
                node.kwargs = kept | _wanted(node, options)
        tuned = sum(1 for node in _calls(decode) if "layout" in node.kwargs)
        note = f"{self.name}: kernels {options.kernels!r} at {len(_calls(decode))} sites, {tuned} with a tuned layout"
        return program.evolve(note, extend=finish(extend), decode=finish(decode))


def _calls(module: GraphModule | None) -> list[Node]:
    return [] if module is None else [node for node in module.graph.nodes if node.target == mixed_attention]


def _said(node: Node) -> dict:
    return {name: node.kwargs[name] for name in BOUND if name in node.kwargs}


def _wanted(node: Node, options: PassOptions) -> dict:
    """What the call of a site should say: nothing where it is the default."""
    site = node.args[2].args[0].args[1]  # the memory that its entries are read from
    wanted: dict = {} if options.kernels == "auto" else {"kernel": options.kernels}
    layout = options.layouts[site] if options.layouts else ()
    return wanted | ({"layout": list(layout)} if layout else {})
