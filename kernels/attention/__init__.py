"""`semkv::attention`: stateless causal attention in the normal form that `find_attention` writes."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.ir import ops
from semkv.ir.choices import chosen_bias, chunk_bias
from semkv.kernels.mixed_attention.blocked import mixed_attention_blocked
from semkv.kernels.registration import register


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    sinks: Tensor | None = None,
    bias_slopes: Tensor | None = None,
    bias_table: Tensor | None = None,
    chosen: Tensor | None = None,
    *,
    site: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
) -> Tensor:
    """Attention of one forward over its own tokens.

    q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], positions [B, T] ascending in each row, chosen [B, T, n] the places among
    them that each token reads, below 0: none; chunk: positions of a run whose tokens read each other alone,
    0: all -> [B, Hq, T, Dv].
    """
    bias = None
    if chosen is not None:
        places = torch.arange(k.shape[2], dtype=torch.int64, device=k.device)
        bias = [chosen_bias(chosen, places.expand(k.shape[0], 1, -1))]
    if chunk:
        bias = [chunk_bias(positions, positions[:, None], chunk)]
    return mixed_attention_blocked(
        q,
        positions,
        [k],
        [v],
        [positions[:, None, :]],
        block_bias=bias,
        sinks=sinks,
        bias_slopes=bias_slopes,
        bias_table=bias_table,
        scale=scale,
        softcap=softcap,
        window=window,
        fresh=True,
    )


register(ops.library, "attention", attention, differentiable=(0, 1, 2, 4, 5, 6))

__all__ = ["attention"]
