"""Attention weights of a few queries at a time: what the measured steps look at, one layer in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .interpreter import SiteCall, scores


def attention_weights(call: SiteCall, k: Tensor, positions: Tensor) -> Tensor:
    """Softmax of the call's queries over keys k [Hkv, n, D] at positions [n]: [Hq, T, n] in float32.

    A sink takes its part, so that rows may sum to less than 1.
    """
    logits = scores(call, k, positions)
    if call.sinks is not None:
        sink = call.sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
        return torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1]
    return torch.softmax(logits, -1)


def query_block(call: SiteCall, start: int, stop: int) -> SiteCall:
    """The call of its queries [start, stop) alone; keys and values stay whole."""
    return replace(call, q=call.q[:, start:stop], positions=call.positions[start:stop])


def weight_blocks(call: SiteCall, first: int, block: int) -> Iterator[tuple[int, Tensor]]:
    """(number of the first query, weights [Hq, b, T] on all of the call's tokens) for queries from `first` on."""
    tokens = call.q.shape[1]
    for start in range(first, tokens, block):
        stop = min(start + block, tokens)
        yield start, attention_weights(query_block(call, start, stop), call.k, call.positions)


def group_mean(weights: Tensor, kv_heads: int) -> Tensor:
    """Mean over the query heads of each group: [Hq, ...] -> [Hkv, ...]."""
    return weights.unflatten(0, (kv_heads, -1)).mean(1)


def smoothed(weights: Tensor, width: int) -> Tensor:
    """Average pooling along the last axis at stride 1, zeros beyond the ends, as SnapKV pools."""
    flat = weights.reshape(1, -1, weights.shape[-1])
    return torch.nn.functional.avg_pool1d(flat, width, stride=1, padding=width // 2).view(weights.shape)
