"""Triton templates of sketch scores: products with packed codes, then what makes them log-probabilities.

A code stands for mean + (level + 1/2) * step in each of r dimensions, so that a query's product with it is a constant of the
query plus the product of (query * step) with the levels: small integers, taken from the packed bytes in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sketch_logits(
    p_q,
    p_map,
    p_codes,
    p_mean,
    p_std,
    p_out,
    p_top,
    p_mass,
    tokens,
    units,
    scale,
    step,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Grid (Hkv, blocks of rows, blocks of units). q [Hq, T, D], map float32 [Hkv, D, r], codes uint8 [Hkv, M, WIDTH] ->
    logits float32 [Hq, T, M], and per block of units their maximum and sum of exponentials float32 [blocks, Hq, T]."""
    kv_head = tl.program_id(0)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = o_row < GROUP * tokens
    rows = kv_head * GROUP * tokens + o_row  # query heads of a group lie together
    o_dim, o_rank = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_RANK)
    in_dim, in_rank = o_dim < DIM, o_rank < RANK
    b_q = tl.load(p_q + rows[:, None] * DIM + o_dim[None, :], mask=live[:, None] & in_dim[None, :], other=0.0)
    b_map = tl.load(
        p_map + (kv_head * DIM + o_dim[:, None]) * RANK + o_rank[None, :],
        mask=in_dim[:, None] & in_rank[None, :],
        other=0.0,
    )
    query = tl.dot(b_q.to(tl.float32), b_map, input_precision="ieee") * scale  # [rows, r]
    mean = tl.load(p_mean + kv_head * RANK + o_rank, mask=in_rank, other=0.0)
    steps = tl.load(p_std + kv_head * RANK + o_rank, mask=in_rank, other=0.0) * step
    constant = tl.sum(query * (mean + (0.5 - (1 << (BITS - 1))) * steps)[None, :], 1)  # levels are stored raised
    query = query * steps[None, :]

    o_unit = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = o_unit < units
    first_bit = o_rank * BITS
    p_bytes = p_codes + (kv_head.to(tl.int64) * units + o_unit[None, :]) * WIDTH + (first_bit // 8)[:, None]
    loaded = there[None, :] & in_rank[:, None]
    levels = tl.load(p_bytes, mask=loaded, other=0).to(tl.int32) >> (first_bit % 8)[:, None]  # [r, N]
    if 8 % BITS != 0:  # a code may straddle two bytes
        straddles = loaded & (first_bit % 8 + BITS > 8)[:, None]
        levels |= tl.load(p_bytes + 1, mask=straddles, other=0).to(tl.int32) << (8 - first_bit % 8)[:, None]
    levels &= (1 << BITS) - 1
    logits = tl.dot(query, levels.to(tl.float32), input_precision="ieee") + constant[:, None]

    tl.store(p_out + rows.to(tl.int64)[:, None] * units + o_unit[None, :], logits, mask=live[:, None] & there[None, :])
    logits = tl.where(there[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    o_block = tl.program_id(2) * tl.num_programs(0) * GROUP * tokens + rows
    tl.store(p_top + o_block, top, mask=live)
    tl.store(p_mass + o_block, tl.sum(tl.exp(logits - top[:, None]), 1), mask=live)


@triton.jit
def normalise_rows(p_scores, p_top, p_mass, rows, units, blocks, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (rows, blocks of units): subtract from scores float32 [rows, M] the log of their row's sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, blocks, CHUNK):
        o_block = first + tl.arange(0, CHUNK)
        top = tl.maximum(top, tl.load(p_top + o_block * rows + row, mask=o_block < blocks, other=float("-inf")))
    highest = tl.max(top, 0)
    mass = tl.zeros([CHUNK], tl.float32)
    for first in range(0, blocks, CHUNK):
        o_block = first + tl.arange(0, CHUNK)
        inside = o_block < blocks
        tops = tl.load(p_top + o_block * rows + row, mask=inside, other=float("-inf"))
        mass += tl.load(p_mass + o_block * rows + row, mask=inside, other=0.0) * tl.exp(tops - highest)
    total = highest + tl.log(tl.sum(mass, 0))
    o_unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_row = p_scores + row * units + o_unit
    tl.store(p_row, tl.load(p_row, mask=o_unit < units) - total, mask=o_unit < units)
