"""Specialise the lowered graphs: constants are computed once, and decode knows that it runs one token."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attribute, copy_graph_module, finish, placeholders
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions

aten = torch.ops.aten


class LowerKernels(Pass):
    """Fold what depends on no input and no parameter; make the length of decode the constant 1."""

    name = "lower_kernels"
    needs = "lowered"
    leaves = "lowered"
    after = ("rewrite_attention",)

    FOLD_BYTES: ClassVar[int] = 1 << 16
    """Largest constant that is stored instead of computed again, in bytes: tables of positions stay as they are."""

    def run(self, program: Program, options: PassOptions) -> Program:
        """The three lowered graphs with fewer nodes; parameters are never folded, so that they stay the user's own."""
        folded: dict[str, Tensor] = {}
        prefill, extend, decode = (copy_graph_module(m) for m in (program.prefill, program.extend, program.decode) if m)
        fixed = _fix_length(decode)
        counts = [_fold_constants(module, self.FOLD_BYTES, folded) for module in (prefill, extend, decode)]
        note = f"{self.name}: {counts[-1]} constants folded, {fixed} sizes of decode fixed at one token"
        return program.evolve(note, prefill=finish(prefill), extend=finish(extend), decode=finish(decode))


def _fix_length(decode: GraphModule) -> int:
    """Replace the length of ids and positions by 1; returns how many size nodes went."""
    inputs = placeholders(decode.graph)
    sizes = [
        node
        for name in ("input_ids", "positions")
        for node in inputs[name].users
        if node.target == aten.sym_size.int and node.args[1] == 1
    ]
    for node in sizes:
        for user in list(node.users):
            user.args = torch.fx.map_arg(user.args, lambda a, node=node: 1 if a is node else a)
            user.kwargs = torch.fx.map_arg(user.kwargs, lambda a, node=node: 1 if a is node else a)
        decode.graph.erase_node(node)
    return len(sizes)


def _fold_constants(module: GraphModule, limit: int, known: dict[str, Tensor]) -> int:
    """Store the values of constant nodes that varying ones read; `known` are those of sister graphs, by name."""
    graph = module.graph
    constants = _constant_values(module, limit)
    count = 0
    for node in list(graph.nodes):
        if node not in constants or node.op == "get_attr" or all(user in constants for user in node.users):
            continue
        target = f"constant_{node.name}"
        value = known.setdefault(target, constants[node])
        module.register_buffer(target, value)
        with graph.inserting_before(node):
            stored = graph.get_attr(target)
        stored.meta = dict(node.meta)
        node.replace_all_uses_with(stored)
        count += 1
    return count


def _constant_values(module: GraphModule, limit: int) -> dict[Node, Tensor]:
    """Values of the nodes that depend on buffers and literals alone and are small enough to be kept."""
    values: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = attribute(module, str(node.target))
            if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
                values[node] = value
        elif _foldable(node) and all(operand in values for operand in node.all_input_nodes):
            with torch.no_grad():
                result = node.target(
                    *torch.fx.map_arg(node.args, values.get), **torch.fx.map_arg(node.kwargs, values.get)
                )
            if isinstance(result, Tensor) and result.numel() * result.element_size() <= limit:
                values[node] = result.clone()
    return values


def _foldable(node: Node) -> bool:
    """A functional ATen call whose result is the same each time and not left uninitialised."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target._schema.is_mutable or "empty" in target._schema.name:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags
