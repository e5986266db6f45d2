"""Rotary embedding and append, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_append_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    where: Tensor,
    slot: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    pool_positions: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """The rotated queries [B, Hq, T, D]; rotated keys, values and positions are written to the pool's slots.

    q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], where int64 [B, T] positions, slot int64 [B, T] (negative: nowhere, else
    each once); the pool is that of `semkv.kernels.mixed_attention.paged.PagedTokens`. cos, sin [B, T, R / 2] turn the first R <= D
    dimensions, pair (i, i + R / 2), or (2 i, 2 i + 1) where `interleaved` (Su et al., "RoFormer", 2021, Eq. 15). Computed in the
    dtype of cos.
    """
    half = cos.shape[-1]
    first = torch.arange(half, dtype=torch.int64, device=q.device) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
        out = x.clone()
        out[..., first] = (a * cos[:, None] - b * sin[:, None]).to(x.dtype)
        out[..., second] = (b * cos[:, None] + a * sin[:, None]).to(x.dtype)
        return out

    k = turned(k)
    for row, token in (slot >= 0).nonzero().tolist():
        at = int(slot[row, token])
        pool_k[:, at] = k[row, :, token].to(pool_k.dtype)
        pool_v[:, at] = v[row, :, token].to(pool_v.dtype)
        pool_positions[:, at] = where[row, token].to(pool_positions.dtype)
    return turned(q)
