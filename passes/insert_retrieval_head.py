"""Put the speculative selector in front of the graph: the retrieval head's own graph, and the features that it reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.errors import ConfigError
from semkv.ir import memory
from semkv.ir.graph import ancestors, attribute, copy_graph_module, finish, placeholders, shape_of
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import aten
from semkv.passes.residual_stream import stream_before_sites
from semkv.passes.retrieval_graph import Lookup, head_graph


class InsertRetrievalHead(Pass):
    """`Program.selector` makes the head's queries and keys of new tokens before any layer runs; where it reads features of the
    token before, the lowered graphs hand the hidden states that enter its sites to the memory."""

    name = "insert_retrieval_head"
    needs = "lowered"
    leaves = "lowered"
    after = ("rewrite_attention",)

    def applies(self, program: Program, options: PassOptions) -> bool:
        return options.retrieval_head is not None

    def run(self, program: Program, options: PassOptions) -> Program:
        """Build the selector and the calls of `semkv.memory.observe`.

        Raises
        ------
        ConfigError: the head does not fit the model's embedding or hidden states; both sizes are named.
        """
        head = options.retrieval_head
        assert head is not None
        section = head.section
        name, embedding = token_embedding(program.body)
        if embedding.shape[1] != section.hidden:
            raise ConfigError(
                f"the retrieval head reads embeddings of {section.hidden} numbers, this model's have {embedding.shape[1]}: "
                "use a profile that was made for this model"
            )
        stream = stream_before_sites(program.body) if section.feature_sites else {}
        _check_features(stream, section.feature_sites, section.features)
        lowered = {
            label: _observed(module, {site: stream[site].name for site in section.feature_sites})
            for label, module in (("prefill", program.prefill), ("extend", program.extend), ("decode", program.decode))
            if module is not None
        }
        saved = 1 - section.parameters / section.whole
        reads = f"embeddings and features of sites {section.feature_sites}" if stream else "embeddings"
        note = (
            f"{self.name}: {section.q_heads} query and {section.kv_heads} KV heads of {section.head_dim} on {reads}, "
            f"{section.parameters} parameters, {saved:.1%} fewer than the one-layer model"
        )
        lookup = _lookup_among(program, embedding)
        return program.evolve(note, selector=head_graph(head, embedding, name, lookup), **lowered)


def token_embedding(body: GraphModule) -> tuple[str, Tensor]:
    """(name, table [vocab, H]) of the embedding of the ids; `ConfigError` where there is none."""
    ids = placeholders(body.graph)["input_ids"]
    for node in body.graph.nodes:
        if node.target == aten.embedding.default and ids in ancestors([node.args[1]]):
            sources = [source for source in ancestors([node.args[0]]) if source.op == "get_attr"]
            if len(sources) == 1:
                table = attribute(body, str(sources[0].target))
                assert isinstance(table, Tensor)
                return str(sources[0].target), table
    raise ConfigError("a retrieval head shares the model's embedding of ids, but this model's graph looks up none")


def _lookup_among(program: Program, embedding: Tensor) -> Lookup:
    """How ids find their embeddings: where processes share the model, each may have a part of the table."""
    ranks, ids = program.ranks, placeholders(program.body.graph)["input_ids"]
    rows = [user for user in ids.users if user.target == aten.sub.Tensor and _inside(user, len(embedding))]
    if ranks is None or not rows:
        return torch.nn.functional.embedding
    first = rows[0].args[1]
    assert isinstance(first, int)
    return lambda ids, table: ranks.lookup(table, ids, first)


def _inside(place: Node, rows: int) -> bool:
    """Whether places in a table are held within its rows, as `shard_heads` does it."""
    return any(user.target == aten.clamp.default and user.args[1:] == (0, rows - 1) for user in place.users)


def _check_features(stream: dict[int, Node], sites: tuple[int, ...], features: int) -> None:
    missing = [site for site in sites if site not in stream]
    if missing:
        raise ConfigError(
            f"the retrieval head reads the hidden states that enter site {missing[0]}, but no tensor of this model holds them "
            "all there: distil a head that reads embeddings alone"
        )
    widths = [shape[-1] for site in sites if (shape := shape_of(stream[site])) is not None]
    if len(widths) == len(sites) and sum(widths) != features:
        raise ConfigError(
            f"the retrieval head reads {features} features, the hidden states at sites {sites} have {sum(widths)}: use a profile "
            "that was made for this model"
        )


def _observed(module: GraphModule, names: dict[int, str]) -> GraphModule:
    """A copy in which the memory sees the tensors of these names."""
    if not names:
        return module
    module = copy_graph_module(module)
    graph = module.graph
    inputs, nodes = placeholders(graph), {node.name: node for node in graph.nodes}
    for site, name in names.items():
        with graph.inserting_after(nodes[name]):
            graph.call_function(memory.observe, (inputs["memory"], site, nodes[name]))
    return finish(module)
