"""Mixed-resolution attention written for reading: every key and value is rebuilt, every score is materialised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.ir.ops import value_dim
from semkv.kernels.codes import code_bits, rebuilt
from semkv.kernels.mixed_attention.blocks import PerBlock, each, first_places, kv_heads_of


def mixed_attention_reference(
    q: Tensor,
    q_positions: Tensor,
    block_k: Sequence[Tensor],
    block_v: Sequence[Tensor],
    block_positions: Sequence[Tensor],
    block_bias: PerBlock = None,
    block_heads: Sequence[int] | None = None,
    block_k_scale: PerBlock = None,
    block_v_scale: PerBlock = None,
    key_u: Tensor | None = None,
    key_s: Tensor | None = None,
    key_v: Tensor | None = None,
    value_u: Tensor | None = None,
    value_s: Tensor | None = None,
    value_v: Tensor | None = None,
    factored_positions: Tensor | None = None,
    factored_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    bias_slopes: Tensor | None = None,
    bias_table: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    fresh: bool = False,
) -> Tensor:
    """One query head at a time, one softmax over all entries that a query may see.

    Shapes are those of `semkv.ir.memory.Entries`; q [B, Hq, T, D], q_positions [B, T] -> [B, Hq, T, Dv]. A query at
    position p sees entries at positions <= p and, where `window` is not 0, > p - window. Soft-cap comes before biases;
    `bias_slopes` [Hq] adds slope * (entry - query position), `bias_table` [Hq, R] adds its entry at the distance, clamped
    to R - 1; `sinks` [Hq] are logits that take mass and give no value. Every query must see an entry or a sink. A hidden
    entry (later than the query, or with bias -inf) has weight 0, so what it holds must be finite: 0 * NaN is NaN.
    """
    batch, q_heads, tokens, _ = q.shape
    kv_heads = kv_heads_of(batch, q_heads, block_k, block_heads)
    group = q_heads // kv_heads
    first = first_places(block_k, block_heads)
    biases, k_scales, v_scales = (each(x, len(block_k)) for x in (block_bias, block_k_scale, block_v_scale))

    def numbers(x: Tensor, scale: Tensor | None, dim: int) -> Tensor:
        return x if scale is None else rebuilt(x, scale, code_bits(x, dim), dim)

    keys = [numbers(k, scale, q.shape[-1]) for k, scale in zip(block_k, k_scales)]
    size = value_dim(q, block_v, block_v_scale, value_v)
    values = [numbers(v, scale, size) for v, scale in zip(block_v, v_scales)]
    parts = list(zip(first, keys, values, block_positions, biases))
    if key_u is not None:
        key = ((key_u * key_s[..., None, :]) @ key_v.transpose(-1, -2)).flatten(2, 3)
        value = ((value_u * value_s[..., None, :]) @ value_v.transpose(-1, -2)).flatten(2, 3)
        bias = None if factored_bias is None else factored_bias.flatten(3, 4)
        parts.append((0, key, value, factored_positions.flatten(2, 3), bias))

    def seen(row: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys [n, D], values, positions [n] and biases [T, n] of all that a query head has."""
        k, v, where, bias = [], [], [], []
        for start, keys, values, positions, own in parts:
            own_row, own_head = divmod(row * kv_heads + head // group - start, keys.shape[1])
            if not 0 <= own_row < keys.shape[0]:
                continue
            k.append(keys[own_row, own_head])
            v.append(values[own_row, own_head])
            where.append(positions[own_row, min(own_head, positions.shape[1] - 1)])
            if own is None:
                bias.append(q.new_zeros(tokens, keys.shape[2]))
            else:
                place = min(own_head * group + head % group, own.shape[1] - 1)
                bias.append(own[own_row, place].expand(tokens, keys.shape[2]))
        return torch.cat(k).to(q.dtype), torch.cat(v).to(q.dtype), torch.cat(where), torch.cat(bias, dim=1)

    rows = []
    for row in range(batch):
        heads = []
        for head in range(q_heads):
            k, v, where, bias = seen(row, head)
            scores = (q[row, head] @ k.T) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = q_positions[row][:, None] - where[None, :]
            if bias_slopes is not None:
                scores = scores - bias_slopes[head] * distance
            if bias_table is not None:
                scores = scores + bias_table[head][distance.clamp(0, bias_table.shape[1] - 1)]
            scores = scores + bias
            hidden = distance < 0
            if window:
                hidden = hidden | (distance >= window)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].to(scores.dtype).expand(tokens, 1)], dim=1)
            weights = torch.softmax(scores, dim=-1)[:, : k.shape[0]]
            heads.append(weights @ v)
        rows.append(torch.stack(heads))
    return torch.stack(rows)
