"""Rotary embedding and append on the device: what is launched for given tensors."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch
from semkv.kernels.rotary_append.template import rotate_and_append


def rotary_append_launches(
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
) -> tuple[Tensor, list[Launch]]:
    """The rotated queries of `rotary_append_reference` and the launch that writes them and the pool; the pool is contiguous."""
    half, dim = cos.shape[-1], q.shape[-1]
    if 2 * half > dim:
        raise InputError(f"cos turns {2 * half} dimensions of heads that have {dim}; expected at most as many")
    for name, pool in (("pool_k", pool_k), ("pool_v", pool_v), ("pool_positions", pool_positions)):
        if not pool.is_contiguous():
            raise InputError(f"{name} is not contiguous; expected the whole pool, which is written in place")
    batch, q_heads, tokens, _ = q.shape
    kv_heads, slots = pool_k.shape[:2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    arguments: dict[str, Tensor | float | None] = {
        "p_q": q.contiguous(),
        "p_k": k.contiguous(),
        "p_v": v.contiguous(),
        "p_cos": cos.contiguous(),
        "p_sin": sin.contiguous(),
        "p_where": where.contiguous(),
        "p_slot": slot.contiguous(),
        "p_out": out,
        "p_pool_k": pool_k,
        "p_pool_v": pool_v,
        "p_pool_places": pool_positions,
        "tokens": tokens,
        "slots": slots,
    }
    constants = {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "VALUE_DIM": v.shape[-1],
        "HALF": half,
        "PLACE_HEADS": pool_positions.shape[0],
        "INTERLEAVED": int(interleaved),
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_DIM": triton.next_power_of_2(dim),
        "BLOCK_VALUE": triton.next_power_of_2(v.shape[-1]),
    }
    return out, [Launch(rotate_and_append, (batch * tokens, q_heads + kv_heads), arguments, constants, 1, 1)]


def rotary_append_triton(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `rotary_append_reference` does, on the device of `q`: the rotated queries and the pool's three tensors."""
    pool = (pool_k, pool_v, pool_positions)
    out, launches = rotary_append_launches(q, k, v, cos, sin, where, slot, *pool, interleaved=interleaved)
    for launch in launches:
        launch.run()
    return out, *pool
