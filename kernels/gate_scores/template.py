"""Triton templates of SeKV's gate: queries through W^T W, once, then products with packed mean keys.

(W q).(W mean) is (W^T W q).mean, so that a step reads the mean keys that the coarse entries keep, and no projection of them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_queries(
    p_q,
    p_weight,
    p_out,
    tokens,
    scale,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (Hq, T): out float32 [Hq, T, D] = W^T W q * scale, W float32 [Hq, WIDTH, D] read once, CHUNK rows at a time."""
    head, token = tl.program_id(0), tl.program_id(1)
    o_dim = tl.arange(0, BLOCK_DIM)
    in_dim = o_dim < DIM
    place = (head * tokens + token) * DIM + o_dim
    query = tl.load(p_q + place, mask=in_dim, other=0.0).to(tl.float32) * scale
    back = tl.zeros([BLOCK_DIM], tl.float32)
    for first in range(0, WIDTH, CHUNK):
        o_width = first + tl.arange(0, CHUNK)
        p_rows = p_weight + (head * WIDTH + o_width)[:, None] * DIM + o_dim[None, :]
        rows = tl.load(p_rows, mask=(o_width < WIDTH)[:, None] & in_dim[None, :], other=0.0)
        back += tl.sum(rows * tl.sum(rows * query[None, :], 1)[:, None], 0)
    tl.store(p_out + place, back, mask=in_dim)


@triton.jit
def gate_products(
    p_query,
    p_codes,
    p_scale,
    p_norms,
    p_lengths,
    p_offset,
    p_threshold,
    p_out,
    tokens,
    units,
    length_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (Hkv, blocks of rows, blocks of units): out float32 [Hq, T, M] from query float32 [Hq, T, D] of `gate_queries` and
    codes uint8 [Hkv, M, BYTES]. length_stride: M where KV heads have lengths of their own, else 0."""
    kv_head = tl.program_id(0)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = o_row < GROUP * tokens
    rows = kv_head * GROUP * tokens + o_row  # query heads of a group lie together
    head = kv_head * GROUP + o_row // tokens
    o_unit = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = o_unit < units
    unit = kv_head.to(tl.int64) * units + o_unit
    per_byte: tl.constexpr = 8 // BITS
    raw = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, DIM, CHUNK):  # tiles of float32 as wide as a head would spill
        o_dim = first + tl.arange(0, CHUNK)
        in_dim = o_dim < DIM
        query = tl.load(p_query + rows[:, None] * DIM + o_dim[None, :], mask=live[:, None] & in_dim[None, :], other=0.0)
        p_bytes = p_codes + unit[None, :] * BYTES + (o_dim // per_byte)[:, None]
        levels = tl.load(p_bytes, mask=there[None, :] & in_dim[:, None], other=0).to(tl.int32)
        levels = (levels >> (BITS * (o_dim % per_byte))[:, None]) & ((1 << BITS) - 1)
        means = (levels - (1 << (BITS - 1))).to(tl.float32)  # [CHUNK, BLOCK]
        raw = tl.dot(query, means, raw, input_precision="ieee")
    scale = tl.load(p_scale + unit, mask=there, other=0.0).to(tl.float32)
    seen = live[:, None] & there[None, :]
    norms = tl.load(p_norms + head.to(tl.int64)[:, None] * units + o_unit[None, :], mask=seen, other=1.0).to(tl.float32)
    raw = raw * scale[None, :] / norms
    sizes = tl.log(tl.load(p_lengths + kv_head * length_stride + o_unit, mask=there, other=1).to(tl.float32))
    own = tl.load(p_offset + head, mask=live, other=0.0) + tl.load(p_threshold + head, mask=live, other=0.0)
    tl.store(
        p_out + rows.to(tl.int64)[:, None] * units + o_unit[None, :], raw + sizes[None, :] - own[:, None], mask=seen
    )
