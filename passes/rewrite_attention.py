"""Make the attention of a program stateful: three graphs that read and write a memory instead of one that does not."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from semkv.ir import memory
from semkv.ir.graph import attention_nodes, copy_graph_module, finish, placeholders
from semkv.ir.memory import Entries
from semkv.ir.ops import mixed_attention
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions
from semkv.passes.recurrent_states import inline_steps, keep_states

OPTIONAL = ("sinks", "bias_slopes", "bias_table")
SETTINGS = ("scale", "softcap", "window")


class RewriteAttention(Pass):
    """Each `semkv::attention` becomes a call of the memory and one `semkv::mixed_attention`."""

    name = "rewrite_attention"
    needs = "annotated"
    leaves = "lowered"
    after = ("assign_budgets", "surprisal_head", "lift_positions")

    def run(self, program: Program, options: PassOptions) -> Program:
        """Build `prefill`, `extend` and `decode` from the body; parameters are shared, never copied."""
        prefill = _rewrite(program.body, fresh=True)
        extend = _rewrite(program.body, fresh=False)
        decode = copy_graph_module(extend)
        for module in (prefill, extend):
            keep_states(module)
        inline_steps(decode)
        note = f"rewrite_attention: {len(program.sites)} sites made stateful in prefill, extend and decode"
        return program.evolve(note, stage="lowered", prefill=prefill, extend=extend, decode=decode)


def _rewrite(body: GraphModule, *, fresh: bool) -> GraphModule:
    """One stateful copy of `body`; `fresh`: the memory is empty, so attention reads the tokens of this call alone."""
    module = copy_graph_module(body)
    graph = module.graph
    last_input = list(placeholders(graph).values())[-1]
    with graph.inserting_after(last_input):
        memory_node = graph.placeholder("memory")
    for node in attention_nodes(graph):
        _replace(module, node, memory_node, fresh)
    return finish(module)


def _replace(module: GraphModule, node: Node, memory_node: Node, fresh: bool) -> None:
    graph = module.graph
    q, k, v, positions = node.args[:4]
    optional = {
        name: node.args[4 + i] if len(node.args) > 4 + i else node.kwargs.get(name) for i, name in enumerate(OPTIONAL)
    }
    kwargs = {name: value for name, value in optional.items() if value is not None}
    kwargs |= {name: node.kwargs[name] for name in SETTINGS if name in node.kwargs}
    site, chosen, chunk = node.kwargs["site"], node.kwargs.get("chosen"), node.kwargs.get("chunk", 0)
    with graph.inserting_before(node):
        if fresh:
            graph.call_function(memory.record, (memory_node, site, q, k, v, positions))
            key_positions = graph.call_function(torch.ops.aten.unsqueeze.default, (positions, 1))
            among: tuple[Node, ...] = ()
            if chosen is not None:
                among = (graph.call_function(memory.chosen_among, (chosen, positions)),)
            elif chunk:
                among = (graph.call_function(memory.chunk_among, (positions, chunk)),)
            new = graph.call_function(
                mixed_attention, (q, positions, [k], [v], [key_positions], *among), kwargs | {"fresh": True}
            )
        else:
            read = graph.call_function(memory.entries, (memory_node, site, q, k, v, positions))
            if chosen is not None or chunk:
                heads = int(k.meta["val"].shape[1])
                group = int(q.meta["val"].shape[1]) // heads
                if chosen is not None:
                    read = graph.call_function(memory.read_chosen, (read, chosen, positions, heads, group))
                else:
                    read = graph.call_function(memory.read_chunk, (read, positions, heads, group, chunk))
            parts = [
                graph.create_node("call_function", operator.getitem, (read, i), name=f"{field}_{site}")
                for i, field in enumerate(Entries._fields)
            ]
            new = graph.call_function(mixed_attention, (q, positions, *parts), kwargs)
    new.meta = dict(node.meta)
    new.meta["semkv_pass"] = RewriteAttention.name
    node.replace_all_uses_with(new)
    graph.erase_node(node)
