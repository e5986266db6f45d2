"""The selector in front of the graph: against loops, with the features that it reads, and on graphs without a place for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from semkv.compiler.pipeline import run_passes
from semkv.errors import ConfigError, SpecError
from semkv.ir import memory, spec
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.insert_retrieval_head import InsertRetrievalHead, token_embedding
from semkv.passes.residual_stream import stream_before_sites
from semkv.passes.retrieval_graph import EMBEDDING, FREQUENCIES, head_graph, queries_and_keys
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead
from semkv.profiles.schema.retrieval_head import (
    PREFIX,
    RetrievalHead,
    RetrievalHeadSection,
    Yarn,
    rotary_frequencies,
)

HIDDEN = 32
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
POSITIONS = torch.arange(7)[None] + 11


def make_head(sites=(1, 2), projected=0, hidden=HIDDEN, **changes) -> RetrievalHead:
    section = RetrievalHeadSection(
        hidden=hidden,
        feature_sites=sites,
        features=hidden * len(sites),
        projected=projected,
        q_heads=4,
        kv_heads=2,
        head_dim=6,
        theta=50.0,
        yarn=Yarn(factor=4, positions=64),
        parameters=100,
        whole=5000,
        **changes,
    )
    generator = torch.Generator().manual_seed(1)
    shapes = section.tensor_shapes()
    return RetrievalHead(
        section,
        {name.removeprefix(PREFIX): torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()},
    )


def lowered(program, head):
    options = PassOptions(method="specontext", retrieval_head=head)
    passes = (SurprisalHead(), AssignBudgets(), RewriteAttention(), InsertRetrievalHead())
    return run_passes(program, passes, options, ran=["find_attention", "lift_positions"])


def reference(head: RetrievalHead, embedding, ids, positions, features):
    """The head in loops over tokens and pairs, rotation as complex numbers."""
    section, weights = head.section, head.tensors
    frequencies, factor = rotary_frequencies(section)

    def normalised(x, weight):
        return x / (x.square().sum() / len(x) + section.epsilon).sqrt() * weight

    def turned(vector, position):
        half = section.head_dim // 2
        out = vector.clone()
        for pair in range(half):
            angle = float(position) * float(frequencies[pair])
            value = complex(vector[pair], vector[pair + half]) * complex(math.cos(angle), math.sin(angle))
            out[pair], out[pair + half] = value.real, value.imag
        return out

    asked, held = [], []
    for place, (token, position) in enumerate(zip(ids.tolist(), positions.tolist())):
        parts = [normalised(embedding[token], weights["input_norm"])]
        if features is not None:
            given = features[place]
            given = weights["projection"] @ given if section.projected else given
            parts.append(normalised(given, weights["feature_norm"]))
        inputs = torch.cat(parts)
        queries, keys = (weights[name] @ inputs for name in ("query", "key"))
        asked.append(torch.stack([turned(q, position) for q in queries.view(section.q_heads, -1)]))
        held.append(torch.stack([turned(k, position) for k in keys.view(section.kv_heads, -1)]))
    scale = factor / math.sqrt(section.head_dim)
    return torch.stack(asked, 1) * scale, torch.stack(held, 1)


@pytest.mark.parametrize(("sites", "projected"), [((), 0), ((1,), 0), ((1, 2), 0), ((1, 2), 5)])
def test_the_graph_is_the_head_as_defined(sites, projected):
    head, embedding = make_head(sites, projected), torch.randn(61, HIDDEN)
    features = torch.randn(1, 7, HIDDEN * len(sites)) if sites else None
    wanted = reference(head, embedding, IDS[0], POSITIONS[0], None if features is None else features[0])
    weights = {EMBEDDING: embedding, FREQUENCIES: rotary_frequencies(head.section)[0], **head.tensors}
    plain = queries_and_keys(head.section, weights, IDS, POSITIONS, features)
    graph = head_graph(head, embedding, "table")
    traced = graph(IDS, POSITIONS, *([] if features is None else [features]))
    for want, one, other in zip(wanted, plain, traced):
        torch.testing.assert_close(one[0], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one, other)
    one_token = graph(IDS[:, :1], POSITIONS[:, :1], *([] if features is None else [features[:, :1]]))
    torch.testing.assert_close(one_token[1][0, :, 0], wanted[1][:, 0], rtol=1e-4, atol=1e-5)


def test_the_stream_is_what_enters_each_layer(decoder_program):
    """The nodes are the sums between layers; a control: no norm or projection is taken for one."""
    stream = stream_before_sites(decoder_program.body)
    assert sorted(stream) == [0, 1, 2]
    kinds = [str(stream[site].target) for site in (0, 1, 2)]
    assert kinds == ["aten.embedding.default", "aten.add.Tensor", "aten.add.Tensor"]


class Observed:
    """A memory that keeps everything and what it was shown."""

    def __init__(self, inner):
        self.inner, self.seen = inner, {}

    def record(self, *args):
        self.inner.record(*args)

    def entries(self, *args):
        return self.inner.entries(*args)

    def observe(self, site, hidden):
        self.seen[site] = hidden


def test_memories_see_the_hidden_states_and_nothing_else_changes(decoder_program, decoder):
    program = lowered(decoder_program, make_head())
    plain = run_passes(
        decoder_program,
        (SurprisalHead(), AssignBudgets(), RewriteAttention()),
        PassOptions(method="specontext"),
        ran=["find_attention", "lift_positions"],
    )
    for label in ("prefill", "extend", "decode"):
        before, after = getattr(plain, label).graph, getattr(program, label).graph
        assert sum(node.target is memory.observe for node in after.nodes) == 2
        assert len(after.nodes) == len(before.nodes) + 2
    assert plain.selector is None
    shown = Observed(PlainMemory(program.sites))
    places = torch.arange(7)[None]
    hidden = program.prefill(IDS, places, shown)
    torch.testing.assert_close(hidden, plain.prefill(IDS, places, PlainMemory(plain.sites)), rtol=0, atol=0)
    entering = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, site=site: entering.__setitem__(site, inputs[0]))
        for site, layer in enumerate(decoder.layers)
    ]
    decoder(IDS, places)
    for hook in hooks:
        hook.remove()
    assert sorted(shown.seen) == [1, 2]
    for site, seen in shown.seen.items():
        torch.testing.assert_close(seen, entering[site])


def test_no_head_no_selector(decoder_program):
    program = lowered(decoder_program, None)
    assert program.selector is None
    assert not any(node.target is memory.observe for node in program.decode.graph.nodes)


def test_embeddings_alone_need_no_hidden_states(decoder_program):
    program = lowered(decoder_program, make_head(()))
    assert program.selector is not None
    assert not any(node.target is memory.observe for node in program.decode.graph.nodes)
    name, table = token_embedding(program.body)
    stored = program.selector
    for part in name.split("."):
        stored = getattr(stored, part)
    assert stored.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()


def test_a_head_of_another_model_is_refused(decoder_program):
    with pytest.raises(ConfigError, match="embeddings of 16 numbers, this model's have 32"):
        lowered(decoder_program, make_head((), hidden=16))
    wide = make_head((1,))
    section = wide.section.model_copy(update={"features": 48})
    with pytest.raises(ConfigError, match=r"reads 48 features, the hidden states at sites \(1,\) have 32"):
        lowered(decoder_program, RetrievalHead(section, wide.tensors))


class Parallel(nn.Module):
    """Two streams that meet at the end: no tensor between the layers holds everything."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(61, HIDDEN)
        self.left, self.right = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(2 * HIDDEN, 61)

    def forward(self, input_ids, positions):
        x = self.table(input_ids)
        a, b = self.left(x), self.right(x)
        for site in range(2):
            heads = a.unflatten(-1, (2, 16)).transpose(1, 2)
            mixed = torch.ops.semkv.attention(heads, heads, heads, positions, site=site, scale=0.25)
            a, b = b, a + mixed.transpose(1, 2).flatten(2)
        return self.out(torch.cat([a, b], -1))


def test_a_model_without_one_stream_is_refused(make_found):
    program = make_found(Parallel(), vocab_size=61)
    assert sorted(stream_before_sites(program.body)) == [0]
    with pytest.raises(ConfigError, match="enter site 1, but no tensor of this model holds them all"):
        lowered(program, make_head((1,)))


def test_the_spec_wants_features_seen_where_they_are_read(decoder_program):
    program = lowered(decoder_program, make_head())
    blind = lowered(decoder_program, None)
    with pytest.raises(SpecError, match=r"selector: reads features, but the graphs observe"):
        spec.check(program.evolve(decode=blind.decode))
