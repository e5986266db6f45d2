"""Mixed-resolution attention written for reading: every key and value is rebuilt, every score is materialised."""

from __future__ import annotations

import torch
from torch import Tensor


def mixed_attention_reference(
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
    """One query head at a time, one softmax over all entries that a query may see.

    Shapes are those of `semkv.ir.memory.Entries`; q [B, Hq, T, D], q_positions [B, T] -> [B, Hq, T, Dv]. A query at
    position p sees entries at positions <= p and, where `window` is not 0, > p - window. Soft-cap comes before biases;
    `bias_slopes` [Hq] adds slope * (entry - query position), `bias_table` [Hq, R] adds its entry at the distance, clamped
    to R - 1; `sinks` [Hq] are logits that take mass and give no value. Every query must see an entry or a sink. A hidden
    entry (later than the query, or with bias -inf) has weight 0, so what it holds must be finite: 0 * NaN is NaN.
    """
    batch, q_heads, tokens, _ = q.shape
    kv_heads = exact_k.shape[1]
    group = q_heads // kv_heads
    keys, values, positions, biases = [exact_k], [exact_v], [exact_positions], [(exact_bias, exact_k.shape[2])]
    if coarse_k is not None:
        keys.append(coarse_k)
        values.append(coarse_v)
        positions.append(coarse_positions)
        biases.append((coarse_bias, coarse_k.shape[2]))
    if key_u is not None:
        spans, length = key_u.shape[2], key_u.shape[3]
        keys.append(((key_u * key_s[..., None, :]) @ key_v.transpose(-1, -2)).flatten(2, 3))
        values.append(((value_u * value_s[..., None, :]) @ value_v.transpose(-1, -2)).flatten(2, 3))
        positions.append(factored_positions.flatten(2, 3))
        biases.append((None if factored_bias is None else factored_bias.flatten(3, 4), spans * length))
    rows = []
    for row in range(batch):
        heads = []
        for head in range(q_heads):
            source = head // group
            k = torch.cat([part[row, source] for part in keys]).to(q.dtype)
            v = torch.cat([part[row, source] for part in values]).to(q.dtype)
            where = torch.cat([part[row, min(source, part.shape[1] - 1)] for part in positions])
            scores = (q[row, head] @ k.T) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = q_positions[row][:, None] - where[None, :]
            if bias_slopes is not None:
                scores = scores - bias_slopes[head] * distance
            if bias_table is not None:
                scores = scores + bias_table[head][distance.clamp(0, bias_table.shape[1] - 1)]
            bias = [
                q.new_zeros(tokens, count)
                if part is None
                else part[row, min(head, part.shape[1] - 1)].expand(tokens, count)
                for part, count in biases
            ]
            scores = scores + torch.cat(bias, dim=1)
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
