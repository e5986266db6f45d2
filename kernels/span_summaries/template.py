"""Triton template of span summaries: a program reads the tokens of one span once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summarise_spans(
    p_x,
    p_start,
    p_length,
    p_surprisal,
    p_mean,
    p_low,
    p_high,
    tokens,
    spans,
    DIM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BOUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid (spans, H): x [H, n, D] -> mean, and where BOUNDS minimum and maximum, float32 [H, s, D]."""
    span, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, length = tl.load(p_start + span), tl.load(p_length + span)
    o_dim = tl.arange(0, BLOCK_DIM)
    in_dim = o_dim < DIM
    total = tl.zeros([], tl.float32)
    weighted = tl.zeros([BLOCK_DIM], tl.float32)
    plain = tl.zeros([BLOCK_DIM], tl.float32)
    low = tl.full([BLOCK_DIM], float("inf"), tl.float32)
    high = tl.full([BLOCK_DIM], float("-inf"), tl.float32)
    for first in range(0, length, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        there = o_token < length
        inside = there[:, None] & in_dim[None, :]
        rows = head * tokens + start + o_token
        b_x = tl.load(p_x + rows[:, None] * DIM + o_dim[None, :], mask=inside, other=0.0).to(tl.float32)
        plain += tl.sum(b_x, 0)
        if WEIGHTED:
            weights = tl.load(p_surprisal + start + o_token, mask=there, other=0.0)
            total += tl.sum(weights, 0)
            weighted += tl.sum(b_x * weights[:, None], 0)
        if BOUNDS:
            low = tl.minimum(low, tl.min(tl.where(inside, b_x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(inside, b_x, float("-inf")), 0))
    mean = plain / length.to(tl.float32)
    if WEIGHTED:  # a span without surprisal has the plain mean
        mean = tl.where(total > 0.0, weighted / tl.where(total > 0.0, total, 1.0), mean)
    at = (head * spans + span) * DIM + o_dim
    tl.store(p_mean + at, mean, mask=in_dim)
    if BOUNDS:
        tl.store(p_low + at, low, mask=in_dim)
        tl.store(p_high + at, high, mask=in_dim)
