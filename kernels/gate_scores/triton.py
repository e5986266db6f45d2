"""SeKV's gate on the device: what is launched for given tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.gate_scores.template import gate_products, gate_queries
from semkv.kernels.generation import Launch, padded

MAX_ROWS = 16
"""Rows of queries per program: the products are of float32, and a wider tile would spill."""


def gate_scores_launches(
    q: Tensor,
    weight: Tensor,
    codes: Tensor,
    scale: Tensor,
    norms: Tensor,
    lengths: Tensor,
    offset: Tensor,
    threshold: Tensor,
    *,
    bits: int,
    block: int = 64,
) -> tuple[Tensor, list[Launch]]:
    """The scores float32 [Hq, T, M] of `gate_scores_reference` and the launches that write them; `block` units a program.

    weight, offset and threshold are float32, lengths int32.
    """
    if bits not in (4, 8):
        raise InputError(f"bits is {bits}; expected 4 or 8")
    q_heads, tokens, dim = q.shape
    kv_heads, units, held = codes.shape
    width = weight.shape[1]
    if codes.dtype != torch.uint8 or held != -(-dim * bits // 8):
        raise InputError(
            f"codes are {codes.dtype} with {held} bytes a span; expected torch.uint8 with {-(-dim * bits // 8)} for {dim} "
            f"numbers of {bits} bits"
        )
    if q_heads % kv_heads or norms.shape[0] != q_heads or weight.shape[0] != q_heads:
        raise InputError(
            f"{q_heads} query heads for {kv_heads} KV heads, with weights of {weight.shape[0]} and norms of {norms.shape[0]}; "
            "expected a multiple, with weights and norms of every query head"
        )
    group = q_heads // kv_heads
    query, out = (q.new_empty((q_heads, tokens, last), dtype=torch.float32) for last in (dim, units))
    own_lengths = lengths.shape[0] > 1
    tile = min(MAX_ROWS, padded(group * tokens))
    projections: dict[str, Tensor | float | None] = {
        "p_q": q.contiguous(),
        "p_weight": weight.contiguous(),
        "p_out": query,
        "tokens": tokens,
        "scale": width**-0.5,
    }
    products: dict[str, Tensor | float | None] = {
        "p_query": query,
        "p_codes": codes.contiguous(),
        "p_scale": scale.contiguous(),
        "p_norms": norms.contiguous(),
        "p_lengths": lengths.contiguous(),
        "p_offset": offset.contiguous(),
        "p_threshold": threshold.contiguous(),
        "p_out": out,
        "tokens": tokens,
        "units": units,
        "length_stride": units if own_lengths else 0,
    }
    first = {"DIM": dim, "WIDTH": width, "CHUNK": 16, "BLOCK_DIM": padded(dim)}
    second = {"GROUP": group, "DIM": dim, "BITS": bits, "BYTES": held, "ROWS": tile, "BLOCK": block, "CHUNK": 32}
    return out, [
        Launch(gate_queries, (q_heads, tokens), projections, first, 4, 1),
        Launch(gate_products, (kv_heads, -(-group * tokens // tile), -(-units // block)), products, second, 4, 1),
    ]


def gate_scores_triton(*arguments: Tensor, bits: int, block: int = 64) -> Tensor:
    """What `gate_scores_reference` computes, in float32, on the device of `q`; arguments are `gate_scores_launches`'s."""
    out, launches = gate_scores_launches(*arguments, bits=bits, block=block)
    for launch in launches:
        launch.run()
    return out
