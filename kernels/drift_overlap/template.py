"""Triton template of the overlap of two sets of tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shared_fraction(p_chosen, p_baseline, p_out, tokens, BLOCK: tl.constexpr):
    """Grid (P,): chosen and baseline int8 [P, n] -> float32 [P], the share of the baseline that is chosen."""
    row = tl.program_id(0).to(tl.int64)
    both = tl.zeros([BLOCK], tl.int32)
    base = tl.zeros([BLOCK], tl.int32)
    for first in range(0, tokens, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        inside = o_token < tokens
        known = tl.load(p_baseline + row * tokens + o_token, mask=inside, other=0).to(tl.int32)
        base += known
        both += known * tl.load(p_chosen + row * tokens + o_token, mask=inside, other=0).to(tl.int32)
    tl.store(p_out + row, tl.sum(both, 0).to(tl.float32) / tl.sum(base, 0).to(tl.float32))
