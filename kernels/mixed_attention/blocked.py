"""Mixed-resolution attention in batched matmuls, a block of queries at a time, factored spans attended in factor space."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from semkv.kernels.mixed_attention.suffix import is_suffix, suffix_attention

BLOCK_SCORES = 1 << 23
"""Scores held at once, over all rows and heads: 32 MiB in float32."""


def mixed_attention_blocked(
    q: Tensor,
    q_positions: Tensor,
    exact_k: Tensor,
    exact_v: Tensor,
    exact_positions: Tensor,
    exact_bias: Tensor | None = None,
    coarse_k: Tensor | None = None,
    coarse_v: Tensor | None = None,
    coarse_positions: Tensor | None = None,
    coarse_bias: Tensor | None = None,
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
    """What `mixed_attention_reference` computes, with its shapes.

    `fresh` says that the exact entries are the queries' own tokens in ascending order, so that a block needs the keys up
    to its own end only. Half-precision inputs are accumulated in float32.
    """
    plain = not (softcap or window) and sinks is None and bias_slopes is None and bias_table is None
    plain = plain and exact_bias is None and coarse_k is None and key_u is None
    if fresh and plain and q.dtype == exact_k.dtype == exact_v.dtype:
        return F.scaled_dot_product_attention(q, exact_k, exact_v, is_causal=True, scale=scale, enable_gqa=True)
    # log-sum-exps have no gradient
    if plain and not torch.is_grad_enabled() and is_suffix(q, q_positions, exact_k, exact_v, exact_positions):
        return suffix_attention(q, exact_k, exact_v, scale)

    batch, q_heads, tokens, _ = q.shape
    kv_heads = exact_k.shape[1]
    group = q_heads // kv_heads
    compute = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32

    def grouped(bias: Tensor, rows: slice) -> Tensor:
        """[B, Hq|1, T|1, ...] -> [B, Hkv|1, G|1, T|1, ...] for the queries of this block."""
        bias = bias if bias.shape[2] == 1 else bias[:, :, rows]
        return bias.unflatten(1, (kv_heads, group) if bias.shape[1] == q_heads and q_heads > 1 else (1, 1))

    def shaped(scores: Tensor, positions: Tensor, where: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
        """Soft-cap, biases and visibility on raw scores [B, Hkv, G, t, n] of entries at `positions` [B, Hkv|1, n]."""
        scores = scores * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = where[:, None, None, :, None] - positions[:, :, None, None, :]
        if bias_slopes is not None:
            scores = scores - bias_slopes.to(compute).view(1, kv_heads, group, 1, 1) * distance
        if bias_table is not None:
            table = bias_table.to(compute).view(kv_heads, group, 1, -1)
            index = distance.clamp(0, table.shape[-1] - 1).expand(batch, kv_heads, group, *distance.shape[-2:])
            scores = scores + torch.gather(table.expand(batch, kv_heads, group, index.shape[-2], -1), -1, index)
        if bias is not None:
            scores = scores + grouped(bias, rows).to(compute)
        hidden = distance < 0
        if window:
            hidden = hidden | (distance >= window)
        return torch.where(hidden, float("-inf"), scores)

    exact_k, exact_v = exact_k.to(compute), exact_v.to(compute)
    entries = exact_k.shape[2] + (0 if coarse_k is None else coarse_k.shape[2])
    entries += 0 if key_u is None else key_u.shape[2] * key_u.shape[3]
    block = max(1, BLOCK_SCORES // max(1, batch * q_heads * entries))
    outputs = []
    for start in range(0, tokens, block):
        rows = slice(start, min(start + block, tokens))
        count = rows.stop - rows.start
        q_block = q[:, :, rows].to(compute).reshape(batch, kv_heads, group * count, -1)
        where = q_positions[:, rows]
        first = max(0, rows.start - window + 1) if fresh and window else 0
        last = rows.stop if fresh else exact_k.shape[2]
        k, v = exact_k[:, :, first:last], exact_v[:, :, first:last]
        bias = None if exact_bias is None else exact_bias[..., first:last]
        raw = (q_block @ k.transpose(-1, -2)).unflatten(2, (group, count))
        scores = [shaped(raw, exact_positions[:, :, first:last], where, bias, rows)]
        if coarse_k is not None:
            raw = (q_block @ coarse_k.to(compute).transpose(-1, -2)).unflatten(2, (group, count))
            scores.append(shaped(raw, coarse_positions, where, coarse_bias, rows))
        if key_u is not None:
            spans, length = key_u.shape[2], key_u.shape[3]
            inner = (q_block[:, :, None] @ key_v.to(compute)) * key_s.to(compute)[..., None, :]
            raw = inner @ key_u.to(compute).transpose(-1, -2)  # [B, Hkv, F, G*t, L]
            raw = raw.transpose(2, 3).flatten(3, 4).unflatten(2, (group, count))
            bias = None if factored_bias is None else factored_bias.flatten(3, 4)
            scores.append(shaped(raw, factored_positions.flatten(2, 3), where, bias, rows))
        if sinks is not None:
            sink = sinks.to(compute).view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, count, 1)
            scores.append(sink)
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).flatten(2, 3)  # [B, Hkv, G*t, n]
        offset = v.shape[2]
        out = weights[..., :offset] @ v
        if coarse_k is not None:
            out = out + weights[..., offset : offset + coarse_k.shape[2]] @ coarse_v.to(compute)
            offset += coarse_k.shape[2]
        if key_u is not None:
            part = weights[..., offset : offset + spans * length].unflatten(3, (spans, length)).transpose(2, 3)
            inner = (part @ value_u.to(compute)) * value_s.to(compute)[..., None, :]
            out = out + (inner @ value_v.to(compute).transpose(-1, -2)).sum(dim=2)
        outputs.append(out.unflatten(2, (group, count)).flatten(1, 2).to(q.dtype))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
