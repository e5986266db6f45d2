"""Attentions are found whichever way they are written, and what is no causal attention is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from semkv.capture.export import capture
from semkv.compiler.pipeline import run_passes
from semkv.errors import CaptureError
from semkv.ir import spec
from semkv.ir.graph import attention_nodes
from semkv.ir.program import Program
from semkv.passes.base import PassOptions
from semkv.passes.canonicalise import Canonicalise
from semkv.passes.find_attention import FindAttention
from semkv.passes.pin_defaults import PinDefaults

aten = torch.ops.aten
VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 41, 24, 4, 2, 6


class Decoder(nn.Module):
    """Embedding, `layers` attentions written by `attend`, projection; float64."""

    layers = 1
    heads, kv_heads, dim, value_dim = HEADS, KV_HEADS, DIM, DIM

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.q = nn.ModuleList(nn.Linear(HIDDEN, self.heads * self.dim) for _ in range(self.layers))
        self.k = nn.ModuleList(nn.Linear(HIDDEN, self.kv_heads * self.dim) for _ in range(self.layers))
        self.v = nn.ModuleList(nn.Linear(HIDDEN, self.kv_heads * self.value_dim) for _ in range(self.layers))
        self.o = nn.ModuleList(nn.Linear(self.heads * self.value_dim, HIDDEN) for _ in range(self.layers))
        self.lm_head = nn.Linear(HIDDEN, VOCAB)
        self.sinks = nn.Parameter(torch.randn(self.heads))
        self.distances = nn.Embedding(20, self.heads)
        self.double().eval()

    def split(self, x, heads):
        return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        for q, k, v, o in zip(self.q, self.k, self.v, self.o):
            q, k, v = self.split(q(x), self.heads), self.split(k(x), self.kv_heads), self.split(v(x), self.kv_heads)
            out = self.attend(q, k, v, input_ids)
            x = x + o(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        return self.lm_head(x)

    def attend(self, q, k, v, ids):
        """q [B, H, T, D], k and v [B, Hkv, T, D] -> [B, H, T, Dv]."""
        raise NotImplementedError


def repeat(x, times):
    """As transformers does: an axis, an expansion, a reshape."""
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


def distance(length):
    places = torch.arange(length)
    return places[:, None] - places[None, :]


class Fused(Decoder):
    def attend(self, q, k, v, ids):
        return F.scaled_dot_product_attention(q, repeat(k, 2), repeat(v, 2), is_causal=True)


class FusedGroups(Decoder):
    def attend(self, q, k, v, ids):
        mask = distance(ids.shape[1]) >= 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)


class FusedWindow(Decoder):
    def attend(self, q, k, v, ids):
        ahead = distance(ids.shape[1])
        mask = torch.where((ahead >= 0) & (ahead < 5000), 0.0, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(q, repeat(k, 2), repeat(v, 2), attn_mask=mask[None, None].to(q.dtype))


class WrittenOut(Decoder):
    """Scaled after the product, masked with -inf where a stored triangle says so, softmax in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("triangle", torch.ones(256, 256, dtype=torch.bool).tril()[None, None])

    def attend(self, q, k, v, ids):
        length = ids.shape[1]
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(DIM)
        scores = scores.masked_fill(~self.triangle[:, :, :length, :length], -math.inf)
        return scores.softmax(-1, dtype=torch.float64).to(q.dtype) @ v


class PreScaled(Decoder):
    """The scale is in the queries; the mask is added and clamped."""

    def attend(self, q, k, v, ids):
        scores = torch.einsum("bhqd,bhkd->bhqk", q * DIM**-0.5, repeat(k, 2))
        mask = torch.full((ids.shape[1], ids.shape[1]), torch.finfo(torch.float32).min).triu(1)
        scores = torch.max(scores + mask, torch.tensor(torch.finfo(torch.float32).min, dtype=torch.float64))
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), repeat(v, 2))


class FlatHeads(Decoder):
    """Batch and heads in one axis, slopes added by `baddbmm`, as BLOOM does."""

    kv_heads = HEADS

    def attend(self, q, k, v, ids):
        batch, heads, length, dim = q.shape
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
        alibi = (slopes[None, :, None] * torch.arange(length)).expand(batch, heads, length)
        q, k, v = (x.reshape(batch * heads, length, -1) for x in (q, k, v))
        scores = torch.baddbmm(alibi.reshape(batch * heads, 1, length), q, k.transpose(1, 2), beta=1.0, alpha=dim**-0.5)
        scores = scores.view(batch, heads, length, length)
        scores = torch.where(distance(length) >= 0, scores, torch.finfo(torch.float32).min)
        weights = scores.softmax(-1).view(batch * heads, length, length)
        return torch.bmm(weights, v).view(batch, heads, length, -1)


class TwoAxes(FlatHeads):
    """Batch and heads are one axis in the first product and two in the second."""

    def attend(self, q, k, v, ids):
        batch, heads, length, _ = q.shape
        q, k = (x.reshape(batch * heads, length, -1) for x in (q, k))
        scores = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, length)
        return scores.masked_fill(distance(length) < 0, -math.inf).softmax(-1) @ v


class FiveAxes(Decoder):
    """Queries split into groups, keys broadcast: no head is ever repeated."""

    def attend(self, q, k, v, ids):
        batch, _, length, dim = q.shape
        q = q.reshape(batch, KV_HEADS, 2, length, dim)
        scores = q @ k[:, :, None].transpose(-1, -2) * 0.4
        scores = scores.masked_fill(distance(length) < 0, -1e9)
        return (scores.softmax(-1) @ v[:, :, None]).reshape(batch, HEADS, length, dim)


class CapAndWindow(Decoder):
    def attend(self, q, k, v, ids):
        ahead = distance(ids.shape[1])
        scores = 5.0 * torch.tanh(q @ repeat(k, 2).transpose(-1, -2) * 0.7 / 5.0)
        scores = scores.masked_fill((ahead < 0) | (ahead >= 9), -math.inf)
        return scores.softmax(-1) @ repeat(v, 2)


class SinksLast(Decoder):
    def attend(self, q, k, v, ids):
        scores = q @ repeat(k, 2).transpose(-1, -2) * 0.4
        scores = scores.masked_fill(distance(ids.shape[1]) < 0, -math.inf)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ repeat(v, 2)


class SinksFirst(Decoder):
    def attend(self, q, k, v, ids):
        scores = q @ repeat(k, 2).transpose(-1, -2) * 0.4
        scores = scores.masked_fill(distance(ids.shape[1]) < 0, -math.inf)
        sinks = (2 * self.sinks)[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)
        return torch.cat([sinks, scores], dim=-1).softmax(-1)[..., 1:] @ repeat(v, 2)


class SinkGate(Decoder):
    """The sink scales the output instead of joining the softmax, as Granite's sliding-window models write it."""

    def attend(self, q, k, v, ids):
        scores = q @ repeat(k, 2).transpose(-1, -2) * 0.4
        scores = scores.masked_fill(distance(ids.shape[1]) < 0, -math.inf)
        gate = (torch.logsumexp(scores, dim=-1) - self.sinks.view(1, -1, 1)).sigmoid()
        return scores.softmax(-1) @ repeat(v, 2) * gate.unsqueeze(-1)


class TableBias(Decoder):
    """A learned bias by clamped distance, values wider than keys, one KV head."""

    kv_heads, value_dim = 1, 10

    def attend(self, q, k, v, ids):
        ahead = distance(ids.shape[1])
        bias = self.distances(ahead.clamp(0, 19)).permute(2, 0, 1)
        scores = q @ k.transpose(-1, -2) + bias
        scores = scores.masked_fill(ahead < 0, -math.inf)
        return scores.softmax(-1) @ v


class Swapped(Decoder):
    """The product is keys @ queries^T, transposed afterwards."""

    def attend(self, q, k, v, ids):
        scores = (repeat(k, 2) @ q.transpose(-1, -2)).transpose(-1, -2) * 0.5
        return scores.masked_fill(distance(ids.shape[1]) < 0, -math.inf).softmax(-1) @ repeat(v, 2)


class TiledValues(Decoder):
    """Keys are repeated by head and values by block: only one KV head per query head describes both."""

    def attend(self, q, k, v, ids):
        return F.scaled_dot_product_attention(q, repeat(k, 2), v.repeat(1, 2, 1, 1), is_causal=True)


class SharedKeys(Decoder):
    """The second layer reads the keys and values of the first."""

    layers = 2

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        k, v = self.split(self.k[0](x), KV_HEADS), self.split(self.v[0](x), KV_HEADS)
        for q, o in zip(self.q, self.o):
            out = F.scaled_dot_product_attention(self.split(q(x), HEADS), repeat(k, 2), repeat(v, 2), is_causal=True)
            x = x + o(out.transpose(1, 2).reshape(x.shape))
        return self.lm_head(x)


class Router(Fused):
    """Attention and a softmax over experts, which is none."""

    def forward(self, input_ids, position_ids):
        logits = super().forward(input_ids, position_ids)
        return logits * logits.softmax(-1)


def find(module: nn.Module) -> Program:
    program = run_passes(capture(module), (Canonicalise(), PinDefaults(), FindAttention()), PassOptions())
    spec.check(program)
    return program


def count(program: Program, target) -> int:
    return sum(node.target == target for node in program.body.graph.nodes)


CASES = [
    (Fused, {"kv_heads": 2, "scale": DIM**-0.5}),
    (FusedGroups, {"kv_heads": 2, "scale": 0.3}),
    (FusedWindow, {"kv_heads": 2, "scale": DIM**-0.5, "window": 5000}),
    (WrittenOut, {"kv_heads": 2, "scale": DIM**-0.5}),
    (PreScaled, {"kv_heads": 2, "scale": 1.0}),
    (FlatHeads, {"kv_heads": 4, "scale": DIM**-0.5, "has_bias": True}),
    (TwoAxes, {"kv_heads": 4, "scale": 1.0}),
    (FiveAxes, {"kv_heads": 2, "scale": 0.4}),
    (CapAndWindow, {"kv_heads": 2, "scale": 0.7, "softcap": 5.0, "window": 9}),
    (SinksLast, {"kv_heads": 2, "scale": 0.4, "has_sinks": True}),
    (SinksFirst, {"kv_heads": 2, "scale": 0.4, "has_sinks": True}),
    (SinkGate, {"kv_heads": 2, "scale": 0.4, "has_sinks": True}),
    (TableBias, {"kv_heads": 1, "scale": 1.0, "value_dim": 10, "has_bias": True}),
    (Swapped, {"kv_heads": 2, "scale": 0.5}),
    (TiledValues, {"kv_heads": 4, "scale": DIM**-0.5}),
    (Router, {"kv_heads": 2, "scale": DIM**-0.5}),
]


@pytest.mark.parametrize(("kind", "expected"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_an_attention_is_found_and_computes_the_same(kind, expected) -> None:
    module = kind()
    program = find(module)
    (site,) = program.sites
    defaults = {"softcap": 0.0, "window": 0, "has_sinks": False, "has_bias": False, "value_dim": DIM, "q_heads": HEADS}
    for name, value in (defaults | expected).items():
        assert getattr(site, name) == pytest.approx(value, rel=1e-12), name
    assert len(attention_nodes(program.body.graph)) == 1
    assert count(program, aten.scaled_dot_product_attention.default) == 0
    assert count(program, aten.softmax.int) == (kind is Router)
    assert count(program, aten.arange.default) == 0, "the mask must die with the site"
    for batch, length in ((2, 63), (1, 111), (3, 1)):
        ids = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))
        positions = torch.arange(length).expand(batch, length)
        with torch.no_grad():
            expected_logits, logits = module(ids, positions), program.body(ids, positions)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-6, atol=1e-6 if site.has_bias else 1e-10)


def test_heads_are_stored_before_they_are_repeated() -> None:
    program = find(Fused())
    (node,) = attention_nodes(program.body.graph)
    assert [node.args[i].meta["val"].shape[1] for i in range(3)] == [HEADS, KV_HEADS, KV_HEADS]
    assert count(program, aten.expand.default) == 0


def test_layers_that_share_keys_and_values_share_a_store() -> None:
    program = find(SharedKeys())
    assert [site.store for site in program.sites] == [0, 0]
    assert len(program.stores) == 1


def test_slopes_are_read_off_the_bias() -> None:
    program = find(FlatHeads())
    (node,) = attention_nodes(program.body.graph)
    slopes = getattr(program.body, node.kwargs["bias_slopes"].target)
    torch.testing.assert_close(slopes, torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64))


def test_a_bias_by_distance_becomes_a_table_that_ends_where_it_is_constant() -> None:
    module = TableBias()
    program = find(module)
    (node,) = attention_nodes(program.body.graph)
    table = getattr(program.body, node.kwargs["bias_table"].target)
    learned = module.distances.weight.detach().T
    torch.testing.assert_close(table, learned - learned[:, :1], rtol=1e-9, atol=1e-9)


def test_sinks_stay_the_user_s_parameter() -> None:
    module = SinksLast()
    program = find(module)
    (node,) = attention_nodes(program.body.graph)
    assert node.kwargs["sinks"].target == "sinks"
    assert program.body.sinks is module.sinks


def test_the_site_carries_its_module_path() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Fused()

        def forward(self, input_ids, position_ids):
            return self.attn(input_ids, position_ids)

    program = find(Block().eval())
    assert program.sites[0].name == "attn"
    (node,) = attention_nodes(program.body.graph)
    assert node.meta["origin"] == "attn: find_attention"


class Bidirectional(Decoder):
    def attend(self, q, k, v, ids):
        return F.scaled_dot_product_attention(q, repeat(k, 2), repeat(v, 2))


class MaskedByIds(Decoder):
    def attend(self, q, k, v, ids):
        mask = (distance(ids.shape[1]) >= 0) & (ids != 0)[:, None, None, :]
        return F.scaled_dot_product_attention(q, repeat(k, 2), repeat(v, 2), attn_mask=mask)


class WrittenOutMaskedByIds(Decoder):
    def attend(self, q, k, v, ids):
        scores = q @ repeat(k, 2).transpose(-1, -2)
        scores = scores.masked_fill((ids == 0)[:, None, None, :] | (distance(ids.shape[1]) < 0), -math.inf)
        return scores.softmax(-1) @ repeat(v, 2)


class Chunks(Decoder):
    def attend(self, q, k, v, ids):
        chunk = torch.arange(ids.shape[1]) // 64
        mask = (distance(ids.shape[1]) >= 0) & (chunk[:, None] == chunk[None, :])
        return F.scaled_dot_product_attention(q, repeat(k, 2), repeat(v, 2), attn_mask=mask)


class ChunksAndFirst(Decoder):
    def attend(self, q, k, v, ids):
        place = torch.arange(ids.shape[1])
        same = (place[:, None] // 64 == place // 64) | (place == 0)
        mask = (distance(ids.shape[1]) >= 0) & same
        return F.scaled_dot_product_attention(q, repeat(k, 2), repeat(v, 2), attn_mask=mask)


class WindowPerHead(Decoder):
    def attend(self, q, k, v, ids):
        ahead = distance(ids.shape[1])
        windows = torch.tensor([4, 8, 16, 32])[:, None, None]
        return F.scaled_dot_product_attention(q, repeat(k, 2), repeat(v, 2), attn_mask=(ahead >= 0) & (ahead < windows))


class PositionBias(Decoder):
    """A bias that depends on the key's position, not on the distance."""

    def attend(self, q, k, v, ids):
        scores = q @ repeat(k, 2).transpose(-1, -2) + torch.sin(torch.arange(ids.shape[1]))
        scores = scores.masked_fill(distance(ids.shape[1]) < 0, -math.inf)
        return scores.softmax(-1) @ repeat(v, 2)


class GatedScores(Decoder):
    """Scores that depend on the tokens beside q.k."""

    def attend(self, q, k, v, ids):
        scores = q @ repeat(k, 2).transpose(-1, -2) + self.distances(ids % 20).permute(0, 2, 1)[:, :, None]
        scores = scores.masked_fill(distance(ids.shape[1]) < 0, -math.inf)
        return scores.softmax(-1) @ repeat(v, 2)


class Pooling(Decoder):
    """A softmax over the tokens that weighs them alike for every query."""

    def attend(self, q, k, v, ids):
        return repeat(v, 2) * q.sum(-1, keepdim=True).softmax(-2)


class NoAttention(Decoder):
    def attend(self, q, k, v, ids):
        return q * repeat(k, 2) + repeat(v, 2)


REFUSED = [
    (Bidirectional, "lets a token see later ones"),
    (MaskedByIds, "depends on token values through"),
    (WrittenOutMaskedByIds, "its mask depends on token values"),
    (ChunksAndFirst, "neither causal nor a sliding window: distance 1 is hidden"),
    (WindowPerHead, "its mask differs between heads"),
    (PositionBias, "additive bias depends on more than head and distance"),
    (GatedScores, "depends on token values"),
    (Pooling, "is a softmax over the tokens, but no attention that can be rewritten"),
    (NoAttention, "no attention found"),
]


def test_chunks_are_recognised() -> None:
    (site,) = find(Chunks()).sites
    assert (site.chunk, site.window, site.treatment) == (64, 64, "method")


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_what_is_no_causal_attention_is_refused_with_its_reason(kind, message) -> None:
    with pytest.raises(CaptureError, match=message):
        find(kind())
