"""Mixed-resolution attention in batched products, a block of queries at a time, factored spans attended in factor space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from semkv.kernels.mixed_attention.blocks import Block, flat_bias, flat_rows, segments
from semkv.kernels.mixed_attention.call import AttentionCall
from semkv.kernels.mixed_attention.streaming import scores, weighted_sum
from semkv.kernels.mixed_attention.suffix import is_suffix, shared_heads, suffix_attention

BLOCK_SCORES = 1 << 23
"""Scores held at once, over all rows and heads: 32 MiB in float32."""


def mixed_attention_blocked(*arguments: Any, **keywords: Any) -> Tensor:
    """What `mixed_attention_reference` computes, with its arguments."""
    return attend_blocked(AttentionCall.of(*arguments, **keywords))


def attend_blocked(call: AttentionCall) -> Tensor:
    """What a call of the operator computes.

    `fresh` says that there is one block, the queries' own tokens in ascending order, so that a block of queries needs the
    keys up to its own end only. Half-precision inputs are accumulated in float32. Blocks are read where they are and as they are:
    nothing is joined or padded, and codes are unpacked a tile at a time (`streaming.py`).
    """
    q, own = call.q, call.entries
    if call.plain:
        k, v = own.block_k[0], own.block_v[0]
        if call.fresh:
            k, v, shared = shared_heads(q, k, v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=shared)
        # log-sum-exps have no gradient
        if not torch.is_grad_enabled() and is_suffix(q, call.q_positions, k, v, own.block_positions[0]):
            return suffix_attention(q, k, v, call.scale)

    batch, q_heads, tokens, _ = q.shape
    kv_heads = call.kv_heads
    group = q_heads // kv_heads
    compute = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
    size, blocks = call.value_dim, call.blocks()
    factors = None
    if own.key_u is not None:
        stored = (own.key_u, own.key_s, own.key_v, own.value_u, own.value_s, own.value_v)
        six = [x.flatten(0, 1).to(compute) for x in stored]
        bias = None if own.factored_bias is None else own.factored_bias.flatten(3, 4)
        places = flat_rows(own.factored_positions.flatten(2, 3), kv_heads)
        factors = _Factors(*six, positions=places, bias=flat_bias(bias, kv_heads, group))  # type: ignore[misc]

    def of_heads(x: Tensor | None) -> Tensor | None:
        """What each query head has, [Hq, ...] -> [B * Hkv, G, ...]."""
        return (
            None if x is None else x.to(compute).unflatten(0, (kv_heads, group)).repeat(batch, 1, *[1] * (x.dim() - 1))
        )

    terms = _Terms(call.softcap, call.window, *map(of_heads, (call.sinks, call.bias_slopes, call.bias_table)))
    asked = (q.to(compute) * call.scale).reshape(batch * kv_heads, group, tokens, -1)
    where = call.q_positions if batch == 1 else call.q_positions.repeat_interleave(kv_heads, 0)
    outputs = [
        _attend(
            asked[first:last],
            where if batch == 1 else where[first:last],
            part,
            terms.of(first, last),
            None if factors is None else factors.of(first, last),
            call.fresh,
            size,
        )
        for first, last, part in segments(blocks, batch * kv_heads)
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out.reshape(batch, q_heads, tokens, -1).to(q.dtype)


@dataclass(frozen=True)
class _Factors:
    """Factored spans of h places: as `semkv.ir.memory.Entries` has them; positions [h|1, F * L], bias [h|1, G|1, T|1, F * L]."""

    key_u: Tensor
    key_s: Tensor
    key_v: Tensor
    value_u: Tensor
    value_s: Tensor
    value_v: Tensor
    positions: Tensor
    bias: Tensor | None

    def of(self, first: int, last: int) -> _Factors:
        own = (None if x is None else x if x.shape[0] == 1 else x[first:last] for x in vars(self).values())
        return _Factors(*own)

    def scores(self, q: Tensor) -> Tensor:
        """q [h, R, D] -> [h, R, F * L]."""
        inner = (q[:, None] @ self.key_v) * self.key_s[..., None, :]
        return (inner @ self.key_u.mT).transpose(1, 2).flatten(2, 3)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """weights [h, R, F * L] -> [h, R, Dv]."""
        part = weights.unflatten(2, self.value_u.shape[1:3]).transpose(1, 2)
        inner = (part @ self.value_u) * self.value_s[..., None, :]
        return (inner @ self.value_v.mT).sum(dim=1)


@dataclass(frozen=True)
class _Terms:
    """What changes scores: per place and query head of its group, sinks and slopes [h, G], table [h, G, R]."""

    softcap: float
    window: int
    sinks: Tensor | None
    slopes: Tensor | None
    table: Tensor | None

    def of(self, first: int, last: int) -> _Terms:
        own = (None if x is None else x[first:last] for x in (self.sinks, self.slopes, self.table))
        return _Terms(self.softcap, self.window, *own)

    def shaped(self, raw: Tensor, where: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
        """Soft-cap, biases and visibility on scaled scores [h, G, t, n] of entries at `positions` [h|1, n], asked at `where`
        [h|1, t]."""
        if self.softcap:
            raw = self.softcap * torch.tanh(raw / self.softcap)
        if self.slopes is not None or self.table is not None or self.window:
            distance = where[:, None, :, None] - positions[:, None, None, :]
            if self.slopes is not None:
                raw = raw - self.slopes[..., None, None] * distance
            if self.table is not None:
                index = distance.clamp(0, self.table.shape[-1] - 1).expand(raw.shape)
                raw = raw + torch.gather(self.table[:, :, None].expand(-1, -1, raw.shape[2], -1), -1, index)
        if bias is not None:
            raw = raw + bias.to(raw.dtype)
        hidden = positions[:, None, None, :] > where[:, None, :, None]
        if self.window:
            hidden = hidden | (distance >= self.window)
        return raw.masked_fill(hidden, float("-inf"))


def _attend(
    q: Tensor, where: Tensor, blocks: list[Block], terms: _Terms, factors: _Factors | None, fresh: bool, value_dim: int
) -> Tensor:
    """Scaled queries [h, G, T, D] at `where` [h|1, T] over the entries of their places -> [h, G, T, Dv = value_dim]."""
    places, group, tokens, _ = q.shape
    entries = sum(block.k.shape[1] for block in blocks) + (0 if factors is None else factors.positions.shape[1])
    size = max(1, BLOCK_SCORES // max(1, places * group * entries))
    outputs = []
    for start in range(0, tokens, size):
        rows = slice(start, min(start + size, tokens))
        asked, count = where[:, rows], rows.stop - rows.start
        own = [_reach(block, rows, terms.window) for block in blocks] if fresh else blocks
        q_rows = q[:, :, rows].flatten(1, 2)
        made = [(scores(q_rows, block.k, block.k_scale), block.positions, block.bias) for block in own]
        if factors is not None:
            made.append((factors.scores(q_rows), factors.positions, factors.bias))
        shaped = [
            terms.shaped(raw.unflatten(1, (group, count)), asked, positions, _rows(bias, rows))
            for raw, positions, bias in made
        ]
        if terms.sinks is not None:
            shaped.append(terms.sinks[:, :, None, None].expand(-1, -1, count, -1))
        weights = torch.softmax(torch.cat(shaped, dim=-1), dim=-1).flatten(1, 2)
        parts = weights.split([part.shape[-1] for part in shaped], dim=-1)
        sums = [weighted_sum(part, block.v, block.v_scale, value_dim) for part, block in zip(parts, own)]
        out = sum(sums[1:], sums[0])
        if factors is not None:
            out = out + factors.weighted_sum(parts[len(own)])
        outputs.append(out.unflatten(1, (group, count)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _reach(block: Block, rows: slice, window: int) -> Block:
    """Of a fresh forward's tokens, those that the queries `rows` can see."""
    seen = slice(max(0, rows.start - window + 1) if window else 0, rows.stop)
    return block.entries(seen)


def _rows(bias: Tensor | None, rows: slice) -> Tensor | None:
    """Of a bias [h|1, G|1, T|1, n], what the queries `rows` have."""
    return bias if bias is None or bias.shape[2] == 1 else bias[:, :, rows]
