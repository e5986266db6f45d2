"""Triton templates of sketch scores: what codes look up in a query's tables, then what makes the sums log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sketch_logits(
    p_tables,
    p_codes,
    p_out,
    p_top,
    p_mass,
    rows,
    units,
    STAGES: tl.constexpr,
    VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (Hkv, blocks of rows, blocks of units). tables float32 [Hkv, R, STAGES, VECTORS], codes uint8 [Hkv, M, STAGES] ->
    logits float32 [Hkv, R, M], and per block of units their maximum and sum of exponentials float32 [blocks, Hkv, R]."""
    kv_head = tl.program_id(0)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = o_row < rows
    row = kv_head * rows + o_row
    o_unit = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    there = o_unit < units
    both = live[:, None] & there[None, :]
    p_code = p_codes + (kv_head.to(tl.int64) * units + o_unit) * STAGES
    p_row = p_tables + row.to(tl.int64)[:, None] * STAGES * VECTORS
    logits = tl.zeros([ROWS, BLOCK], tl.float32)
    for stage in tl.range(0, STAGES, loop_unroll_factor=4):
        code = tl.load(p_code + stage, mask=there, other=0).to(tl.int32)
        logits += tl.load(p_row + stage * VECTORS + code[None, :], mask=both, other=0.0)

    tl.store(p_out + row.to(tl.int64)[:, None] * units + o_unit[None, :], logits, mask=both)
    logits = tl.where(there[None, :], logits, float("-inf"))
    top = tl.max(logits, 1)
    o_block = tl.program_id(2) * tl.num_programs(0) * rows + row
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
