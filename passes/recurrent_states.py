"""Make the recurrent sites of a program stateful: their bodies go on from the states that a memory holds."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from semkv.ir import memory
from semkv.ir.graph import attribute, finish, placeholders
from semkv.ir.recurrence import Choice, Pieces, recurrent_nodes


def keep_states(module: GraphModule) -> None:
    """In place: each body runs from the memory's states on, over any number of tokens. One without states stays as it is."""
    graph = module.graph
    held = placeholders(graph)["memory"]
    for node in _stateful(module):
        pieces, site, tensors, weights = node.args
        with graph.inserting_before(node):
            new = graph.call_function(memory.advance, (held, site, pieces, tensors, weights))
        _replace(node, new)
    finish(module)


def inline_steps(module: GraphModule) -> None:
    """In place: the graph of each body over one token stands where it was called, between reading its states and keeping them; one without
    states stays a call, and one that chooses is run from the memory's states on."""
    graph = module.graph
    held = placeholders(graph)["memory"]
    for node in _stateful(module):
        path, site, tensors, weights = node.args
        pieces = _body(module, node)
        if isinstance(pieces, Choice):
            with graph.inserting_before(node):
                new = graph.call_function(memory.advance, (held, site, path, tensors, weights))
            _replace(node, new)
            continue
        step = pieces.graphs[1]
        with graph.inserting_before(node):
            before = graph.call_function(memory.read_states, (held, site))
            states = [graph.call_function(operator.getitem, (before, i)) for i in range(len(pieces.states))]
            results = _copied(module, step, [*tensors, *states, *weights], node, str(path.target))
            count = len(pieces.outputs)
            graph.call_function(memory.write_states, (held, site, results[count:]))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    finish(module)


def _stateful(module: GraphModule) -> list[Node]:
    """The calls of bodies that have states."""
    return [node for node in recurrent_nodes(module.graph) if _body(module, node).states]


def _body(module: GraphModule, node: Node) -> Pieces:
    pieces = attribute(module, str(node.args[0].target))
    assert isinstance(pieces, Pieces)
    return pieces


def _copied(module: GraphModule, step: GraphModule, given: list[Node], at: Node, path: str) -> list[Node]:
    """The nodes of `step` with the inputs `given`, before the insertion point; what they return."""
    copies = dict(zip((x for x in step.graph.nodes if x.op == "placeholder"), given, strict=True))
    for node in step.graph.nodes:
        if node.op == "output":
            return [copies[x] for x in node.args[0]]
        if node.op == "get_attr":
            name = f"{path}_{node.target}"
            if not hasattr(module, name):
                module.register_buffer(name, attribute(step, str(node.target)))
            copies[node] = module.graph.get_attr(name)
        elif node.op != "placeholder":
            copies[node] = module.graph.node_copy(node, copies.__getitem__)
        else:
            continue
        copies[node].meta = {**node.meta, "nn_module_stack": at.meta.get("nn_module_stack")}
    raise AssertionError("a body without an output")


def _replace(node: Node, new: Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


__all__ = ["inline_steps", "keep_states"]
