"""`semkv::attention`: stateless causal attention in the normal form that `find_attention` writes."""

from __future__ import annotations

from torch import Tensor

from semkv.ir import ops
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
    *,
    site: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Attention of one forward over its own tokens.

    q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], positions [B, T] ascending in each row -> [B, Hq, T, Dv].
    """
    return mixed_attention_blocked(
        q,
        positions,
        [k],
        [v],
        [positions[:, None, :]],
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
