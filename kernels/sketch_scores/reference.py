"""Sketch scores written for reading: codes are taken apart bit by bit, every key's sketch is rebuilt."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.profiles.schema.codes import decode


def sketch_scores_reference(
    q: Tensor, query_map: Tensor, codes: Tensor, mean: Tensor, std: Tensor, *, bits: int, scale: float
) -> Tensor:
    """Log-probabilities [Hq, T, M] of M folded tokens by (q A).decode(codes) * scale, over each query's tokens.

    q [Hq, T, D]; query_map A [Hkv, D, r]; codes uint8 [Hkv, M, ceil(r * bits / 8)], the levels of a token one after the other,
    the lowest bit first, raised by 2^(bits - 1); mean, std [Hkv, r]. Computed in the dtype of `query_map`.
    """
    kv_heads, _, rank = query_map.shape
    levels = torch.zeros(*codes.shape[:2], rank, dtype=torch.int64, device=codes.device)
    for number in range(rank):
        for bit in range(bits):
            place = number * bits + bit
            levels[..., number] += ((codes[..., place // 8].long() >> (place % 8)) & 1) << bit
    keys = decode(levels - (1 << (bits - 1)), mean, std, bits)  # [Hkv, M, r]
    group = q.shape[0] // kv_heads
    query = q.to(query_map.dtype) @ query_map.repeat_interleave(group, 0)  # [Hq, T, r]
    return (query @ keys.repeat_interleave(group, 0).mT * scale).log_softmax(-1)
