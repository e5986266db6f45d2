"""Sketch scores on the device: what is launched for given tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch, padded
from semkv.kernels.sketch_scores.template import normalise_rows, sketch_logits
from semkv.profiles.schema.codes import STEPS

MAX_ROWS = 16
"""Rows of queries per program: the products are of float32, and a wider tile would spill."""
CHUNK = 128


def sketch_scores_launches(
    q: Tensor, query_map: Tensor, codes: Tensor, mean: Tensor, std: Tensor, *, bits: int, scale: float, block: int = 128
) -> tuple[Tensor, list[Launch]]:
    """The scores float32 [Hq, T, M] of `sketch_scores_reference` and the launches that write them; `block` units a program.

    query_map, mean and std are float32.
    """
    if bits not in STEPS:
        raise InputError(f"bits is {bits}; expected 1 to {max(STEPS)}")
    q_heads, tokens, dim = q.shape
    kv_heads, _, rank = query_map.shape
    units, width = codes.shape[1:]
    if codes.dtype != torch.uint8 or width != -(-rank * bits // 8):
        raise InputError(
            f"codes are {codes.dtype} with {width} bytes a token; expected torch.uint8 with {-(-rank * bits // 8)} for "
            f"{rank} numbers of {bits} bits"
        )
    if q_heads % kv_heads:
        raise InputError(f"{q_heads} query heads for {kv_heads} KV heads; expected a multiple")
    group, rows, blocks = q_heads // kv_heads, q_heads * tokens, -(-units // block)
    out = q.new_empty((q_heads, tokens, units), dtype=torch.float32)
    top, mass = (q.new_empty((blocks, q_heads, tokens), dtype=torch.float32) for _ in range(2))
    tile = min(MAX_ROWS, padded(group * tokens))
    products: dict[str, Tensor | float | None] = {
        "p_q": q.contiguous(),
        "p_map": query_map.contiguous(),
        "p_codes": codes.contiguous(),
        "p_mean": mean.contiguous(),
        "p_std": std.contiguous(),
        "p_out": out,
        "p_top": top,
        "p_mass": mass,
        "tokens": tokens,
        "units": units,
        "scale": float(scale),
        "step": STEPS[bits],
    }
    constants = {
        "GROUP": group,
        "DIM": dim,
        "RANK": rank,
        "BITS": bits,
        "WIDTH": width,
        "ROWS": tile,
        "BLOCK": block,
        "BLOCK_DIM": padded(dim),
        "BLOCK_RANK": padded(rank),
    }
    sums: dict[str, Tensor | float | None] = {
        "p_scores": out,
        "p_top": top,
        "p_mass": mass,
        "rows": rows,
        "units": units,
        "blocks": blocks,
    }
    grid = (kv_heads, -(-group * tokens // tile), blocks)
    return out, [
        Launch(sketch_logits, grid, products, constants, 4, 1),
        Launch(normalise_rows, (rows, blocks), sums, {"BLOCK": block, "CHUNK": CHUNK}, 4, 1),
    ]


def sketch_scores_triton(*arguments: Tensor, bits: int, scale: float, block: int = 128) -> Tensor:
    """What `sketch_scores_reference` computes, in float32, on the device of `q`; arguments are `sketch_scores_launches`'s."""
    out, launches = sketch_scores_launches(*arguments, bits=bits, scale=scale, block=block)
    for launch in launches:
        launch.run()
    return out
