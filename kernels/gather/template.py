"""Triton template that copies waiting tokens to slots: rows are read where they are, and dequantised on the way.

The pool may be pinned host memory: a GPU reads it through the link at its own address, so that only the rows that are missed cross, and no
copy is made in between.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def copy_rows(
    p_tokens,
    p_waiting,
    p_scale,
    p_into,
    capacity,
    count,
    DIM: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (blocks of tokens,): waiting [Hkv, capacity, D], tokens int64 [3, n] (heads, places, rows) -> into [rows, D]. Tokens of a head
    below 0 are not copied."""
    o_token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_dim = tl.arange(0, BLOCK_DIM)
    live = o_token < count
    head = tl.load(p_tokens + o_token, mask=live, other=-1)
    live = live & (head >= 0)
    place = tl.load(p_tokens + count + o_token, mask=live, other=0)
    at = tl.load(p_tokens + 2 * count + o_token, mask=live, other=0)
    rows = head * capacity + place
    inside = live[:, None] & (o_dim < DIM)[None, :]
    found = tl.load(p_waiting + rows[:, None] * DIM + o_dim[None, :], mask=inside, other=0)
    if QUANTISED:
        scale = tl.load(p_scale + rows, mask=live, other=0.0).to(tl.float32)
        found = (found.to(tl.float32) - 128.0) * scale[:, None]
    tl.store(p_into + at[:, None] * DIM + o_dim[None, :], found.to(p_into.dtype.element_ty), mask=inside)
