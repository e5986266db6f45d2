"""Triton template of the gather of waiting tokens: rows are read where they are, and dequantised on the way.

The pool may be pinned host memory: a GPU reads it through the link at its own address, so that only the rows that are missed cross, no
list of them goes to the host, and no copy is made in between.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows(
    p_waiting, p_scale, p_index, p_out, capacity, count,
    DIM: tl.constexpr, QUANTISED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, blocks of places): waiting [Hkv, capacity, D], index int64 [Hkv, s] -> [Hkv, s, D]."""
    head = tl.program_id(0).to(tl.int64)
    o_place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_dim = tl.arange(0, BLOCK_DIM)
    live = o_place < count
    token = tl.load(p_index + head * count + o_place, mask=live, other=-1)
    inside = (live & (token >= 0))[:, None] & (o_dim < DIM)[None, :]
    rows = head * capacity + token
    found = tl.load(p_waiting + rows[:, None] * DIM + o_dim[None, :], mask=inside, other=0)
    if QUANTISED:
        scale = tl.load(p_scale + rows, mask=live & (token >= 0), other=0.0).to(tl.float32)
        found = (found.to(tl.float32) - 128.0) * scale[:, None]
    written = live[:, None] & (o_dim < DIM)[None, :]
    at = p_out + (head * count + o_place)[:, None] * DIM + o_dim[None, :]
    tl.store(at, tl.where(inside, found, 0).to(p_out.dtype.element_ty), mask=written)
