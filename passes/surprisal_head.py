"""Split the vocabulary projection from the body, so that logits are made for the positions that need them.

Generation needs the logits of one position, surprisal those of all tokens but a chunk at a time; a body that returns
hidden
states never holds [B, T, vocab] at once.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from semkv.ir.graph import ancestors, copy_graph_module, descendants, describe, finish, output_value, shape_of
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions

aten = torch.ops.aten

PROJECTIONS = (aten.linear.default, aten.matmul.default)
POINTWISE = frozenset(
    {
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.tanh.default,
        aten.clamp.default,
        aten.neg.default,
        aten.to.dtype,
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.dropout.default,
    }
)
"""What may follow the projection: functions that treat every position and every rank alike."""


class SurprisalHead(Pass):
    """The body returns hidden states [B, T, H]; `Program.head` maps hidden states [..., H] to logits [..., vocab]."""

    name = "surprisal_head"
    needs = "found"
    leaves = "found"
    after = ("find_attention",)

    def applies(self, program: Program, options: PassOptions) -> bool:
        return program.head is None

    def run(self, program: Program, options: PassOptions) -> Program:
        """Cut at the last projection to the vocabulary; where there is none to cut at, the head is the identity."""
        logits = output_value(program.body.graph)
        projection = _find_projection(program.body, logits, program.vocab_size)
        tail = None if projection is None else _tail(projection, logits)
        if projection is None or tail is None:
            why = (
                "no projection to the vocabulary" if projection is None else "positions are mixed or reshaped after it"
            )
            note = f"surprisal_head: not split ({why}); the body returns logits, the head is the identity"
            return program.evolve(note, head=_identity_head(program.body))
        head = _build_head(program.body, projection, tail, logits)
        body = _cut_body(program.body, projection)
        note = f"surprisal_head: split at {describe(projection)}, {len(tail) - 1} operations after it"
        return program.evolve(note, body=body, head=head)


def _find_projection(body: GraphModule, logits: Node, vocab_size: int) -> Node | None:
    """The last projection that the logits are computed from, all of whose operands but the hidden states are fixed."""
    needed = ancestors([logits])
    for node in reversed(list(body.graph.nodes)):
        if node in needed and node.op == "call_function" and node.target in PROJECTIONS:
            return node if _is_vocabulary_projection(node, vocab_size) else None
    return None


def _is_vocabulary_projection(node: Node, vocab_size: int) -> bool:
    """Padded vocabularies are cut after the projection, so it may be wider than `vocab_size`."""
    hidden, output = shape_of(node.args[0]), shape_of(node)
    if hidden is None or output is None or len(hidden) != 3 or len(output) != 3:
        return False
    constant = not any(_reads_input(operand) for operand in node.all_input_nodes if operand is not node.args[0])
    return constant and isinstance(output[-1], int) and output[-1] >= vocab_size and _reads_input(node.args[0])


def _reads_input(node: Node) -> bool:
    return any(ancestor.op == "placeholder" for ancestor in ancestors([node]))


def _tail(projection: Node, logits: Node) -> list[Node] | None:
    """The nodes from the projection to the logits in order; None when one of them is not pointwise in the position."""
    between = descendants([projection]) & ancestors([logits])
    ordered = [node for node in projection.graph.nodes if node in between]
    for node in ordered[1:]:
        if not (_pointwise(node) or _cuts_vocabulary(node)):
            return None
        outside = [operand for operand in node.all_input_nodes if operand not in between]
        if any(_reads_input(operand) for operand in outside):
            return None
    # Something beside the logits that reads the hidden states stays in the body; something that reads the projection
    # from there would make the body compute it after all.
    return ordered


def _pointwise(node: Node) -> bool:
    if node.target not in POINTWISE:
        return False
    # A constant operand must not carry a position axis of its own.
    shapes = [shape_of(operand) for operand in node.all_input_nodes]
    full = shape_of(node)
    return full is not None and all(shape is not None and (len(shape) <= 1 or shape == full) for shape in shapes)


def _cuts_vocabulary(node: Node) -> bool:
    """A slice of the last dimension: the padding of the vocabulary is cut off."""
    if node.target != aten.slice.Tensor:
        return False
    shape = shape_of(node)
    dim = node.args[1] if len(node.args) > 1 else 0
    return shape is not None and dim in (-1, len(shape) - 1)


def _build_head(body: GraphModule, projection: Node, tail: list[Node], logits: Node) -> GraphModule:
    graph = Graph()
    hidden_source = projection.args[0]
    hidden = graph.placeholder("hidden")
    hidden.meta["val"] = hidden_source.meta.get("val")
    copied: dict[Node, Node] = {hidden_source: hidden}
    kept = set(tail)
    constants = {
        node
        for member in tail
        for node in ancestors(o for o in member.all_input_nodes if o not in kept and o not in copied)
    }
    for node in body.graph.nodes:
        if node in kept or (node in constants and node not in copied):
            copied[node] = graph.node_copy(node, copied.__getitem__)
    for node in tail[1:]:
        if node.target == aten.slice.Tensor:
            copied[node].update_arg(1, -1)
    graph.output(copied[logits])
    return finish(GraphModule(body, graph, class_name="Head"))


def _cut_body(body: GraphModule, projection: Node) -> GraphModule:
    module = copy_graph_module(body)
    names = {node.name: node for node in module.graph.nodes}
    hidden = names[projection.args[0].name]
    module.graph.output_node().args = (hidden,)
    return finish(module)


def _identity_head(body: GraphModule) -> GraphModule:
    graph = Graph()
    hidden = graph.placeholder("hidden")
    hidden.meta["val"] = output_value(body.graph).meta.get("val")
    graph.output(hidden)
    return GraphModule(torch.nn.Module(), graph, class_name="IdentityHead")
