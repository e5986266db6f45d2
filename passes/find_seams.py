"""Find where what a prompt brings besides its ids enters the body: embeddings, rotary positions of several axes, features of images."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, GraphModule, Node

from semkv.ir.graph import module_path, output_value, placeholders, reads_sizes_only, shape_of
from semkv.ir.program import Program
from semkv.ir.seams import EMBEDDINGS
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import aten
from semkv.passes.residual_stream import stream_before_sites

VIEWS = frozenset(
    {aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor, aten.view.default, aten.clone.default}
)
"""What may lie between the position input and rotary positions of several axes."""


class FindSeams(Pass):
    """`Program.seams` names the places, by data flow; the graph stays as it is."""

    name = "find_seams"
    needs = "found"
    leaves = "found"
    after = ("lift_positions", "surprisal_head")

    def run(self, program: Program, options: PassOptions) -> Program:
        """Name what there is; where embeddings cannot stand in the place of ids, the reason."""
        graph = program.body.graph
        embeddings, reason = _embeddings(graph)
        rotary = _rotary(graph)
        streams = _streams(program.body, program) if program.seams.reads_more else ()
        seams = replace(
            program.seams,
            embeddings="" if embeddings is None else embeddings.name,
            reason=reason,
            rotary="" if rotary is None else rotary.name,
            axes=1 if rotary is None else int(shape_of(rotary)[0]),
            streams=streams,
        )
        note = f"{self.name}: embeddings at {seams.embeddings}" if embeddings else f"{self.name}: ids alone, {reason}"
        note += f", positions of {seams.axes} axes at {seams.rotary}" if rotary else ""
        note += f", features may enter {len(streams)} layers" if streams else ""
        return program.evolve(note, seams=seams)


def _embeddings(graph: Graph) -> tuple[Node | None, str]:
    """The node that is all that the graph knows of its ids; else why there is none."""
    ids = placeholders(graph)["input_ids"]
    marked = [node for node in graph.nodes if node.meta.get(EMBEDDINGS)]
    looked_up = [node for node in graph.nodes if node.target == aten.embedding.default and ids in node.all_input_nodes]
    found = marked or looked_up
    if not found:
        return None, "as the graph looks up no embedding of its ids"
    if len(found) > 1 or _reached(ids, found[0], output_value(graph)):
        return None, "as it reads its ids in several places, and one embedding cannot stand for all of them"
    return found[0], ""


def _reached(first: Node, without: Node, last: Node) -> bool:
    """Whether numbers of `first` reach `last` on a way that does not lead through `without`."""
    seen, waiting = {first}, [first]
    while waiting:
        for user in waiting.pop().users:
            if user is last:
                return user is not without
            if user not in seen and user is not without and not reads_sizes_only(user):
                seen.add(user)
                waiting.append(user)
    return False


def _rotary(graph: Graph) -> Node | None:
    """The last view of the position input that has a leading axis of a fixed size: [axes, B, T]."""
    node, found = placeholders(graph)["positions"], None
    while True:
        views = [user for user in node.users if user.target in VIEWS and user.args[0] is node]
        axes = [user for user in views if _axes_of(user) is not None]
        if not axes:
            return found
        if len(axes) > 1 and found is not None:
            return found
        node = axes[0]
        if _axes_of(node) != 1:
            found = node


def _axes_of(node: Node) -> int | None:
    """The fixed leading size of a tensor [axes, B, T]."""
    shape = shape_of(node)
    return shape[0] if shape is not None and len(shape) == 3 and isinstance(shape[0], int) else None


def _streams(body: GraphModule, program: Program) -> tuple[tuple[int, str], ...]:
    """The hidden states that enter the layers of sites, where they are made before the layer and not in it."""
    found = stream_before_sites(body)
    return tuple(
        (site.index, found[site.index].name)
        for site in program.sites
        if site.index in found and not _shared(site.name, module_path(found[site.index]))
    )


def layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.self_attn`: up to the first number in a module's path; "" where there is none."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _shared(site: str, path: str) -> bool:
    layer = layer_of(site)
    return not layer or path == layer or path.startswith(f"{layer}.")
