"""Where the hidden state of a token is one tensor: the places between the layers of a captured model."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from semkv.ir.graph import ancestors, attention_nodes, output_value, placeholders, reads_sizes_only, shape_of


def stream_before_sites(body: GraphModule) -> dict[int, Node]:
    """For each attention site the last tensor [B, T, H] before it through which everything that the model knows of the ids
    passes: the hidden states that enter the site's layer, by whatever name. Sites that have none since the site before are left
    out.

    A node is such a place where no edge leads from an earlier node past it to a later one, among the nodes that lie between
    the ids and the output.
    """
    graph = body.graph
    wanted = ancestors([output_value(graph)])
    reached: set[Node] = {placeholders(graph)["input_ids"]}
    order: list[Node] = []
    for node in graph.nodes:
        if node in reached or (
            node in wanted
            and not reads_sizes_only(node)
            and any(operand in reached for operand in node.all_input_nodes)
        ):
            reached.add(node)
            order.append(node)
    place = {node: number for number, node in enumerate(order)}
    farthest, found, last = 0, {}, None
    sites = {node: node.kwargs["site"] for node in attention_nodes(graph)}
    for number, node in enumerate(order):
        if node in sites and last is not None:
            found[sites[node]] = last
            last = None  # the next site's lies behind this one
        shape = shape_of(node)
        # Loaded graphs do not say their shapes.
        if farthest <= number and number and (shape is None or (len(shape) == 3 and isinstance(shape[-1], int))):
            last = node
        farthest = max([farthest, *(place[user] for user in node.users if user in place)])
    return found
