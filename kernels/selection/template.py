"""Triton templates of selection under a budget: a radix search for the lowest score that is still affordable.

Scores become 32-bit keys in the same order. Pass by pass, from the highest digit on, the costs of the keys that agree with the
digits found so far are added up by their next digit; the digit at which the allowance runs out is the next of the key sought.
Keys above it are chosen, keys equal to it in order of index as long as they fit. What a pass needs of the passes before
it is in their sums, so the host is never asked. (Weighted radix select; Alabi et al., "Fast k-selection algorithms for graphics
processing units", 2012, for the unweighted one.)
"""

from __future__ import annotations

import triton
import triton.language as tl

DIGIT_BITS = tl.constexpr(4)
DIGITS = tl.constexpr(16)
PASSES = tl.constexpr(8)


@triton.jit
def unit_keys(p_score, p_threshold, p_key, tokens, units, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (Hkv, blocks): score [Hq, T, M] -> key int64 [Hkv, M], 0 where no query of the group wants the unit."""
    kv_head = tl.program_id(0)
    o_unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = o_unit < units
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, GROUP * tokens, ROWS):
        o_row = first + tl.arange(0, ROWS)
        live = o_row < GROUP * tokens
        rows = kv_head * GROUP * tokens + o_row
        least = tl.load(p_threshold + kv_head * GROUP + o_row // tokens, mask=live, other=float("inf"))
        scores = tl.load(
            p_score + rows.to(tl.int64)[:, None] * units + o_unit[None, :],
            mask=live[:, None] & there[None, :],
            other=float("-inf"),
        )
        best = tl.maximum(best, tl.max(tl.where(scores > least[:, None], scores, float("-inf")), 0))
    bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)  # -0 and 0 are equal scores
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000
    tl.store(p_key + kv_head.to(tl.int64) * units + o_unit, tl.where(best == float("-inf"), 0, ordered), mask=there)


@triton.jit
def _found(p_sums, kv_heads, kv_head, allowance, PASS: tl.constexpr):
    """After PASS passes: the digits found so far, and what is left of the allowance once all above them is paid."""
    prefix = tl.zeros([], tl.int64)
    left = tl.zeros([], tl.int64) + allowance
    o_digit = tl.arange(0, DIGITS)
    for number in tl.static_range(PASS):
        sums = tl.load(p_sums + (number * kv_heads + kv_head) * DIGITS + o_digit)
        paid = tl.sum(
            tl.where(o_digit[None, :] >= o_digit[:, None], sums[None, :], 0), 1
        )  # of this digit and all above
        digit = tl.max(tl.where(paid > left, o_digit, 0), 0)
        left -= tl.sum(tl.where(o_digit > digit, sums, 0), 0)
        prefix = prefix * DIGITS + digit
    return prefix, left


@triton.jit
def digit_sums(p_key, p_cost, p_sums, units, allowance, PASS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (Hkv, blocks): add the costs of pass PASS by digit to sums int64 [8, Hkv, 16], zero before the first."""
    kv_head, kv_heads = tl.program_id(0), tl.num_programs(0)
    prefix, _ = _found(p_sums, kv_heads, kv_head, allowance, PASS)
    o_unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = o_unit < units
    at = kv_head.to(tl.int64) * units + o_unit
    keys = tl.load(p_key + at, mask=there, other=0)
    costs = tl.load(p_cost + at, mask=there & (keys > 0), other=0).to(tl.int64)
    shift: tl.constexpr = (PASSES - 1 - PASS) * DIGIT_BITS
    upper = keys >> shift
    costs = tl.where(upper // DIGITS == prefix, costs, 0)
    o_digit = tl.arange(0, DIGITS)
    sums = tl.sum(tl.where((upper % DIGITS)[:, None] == o_digit[None, :], costs[:, None], 0), 0)
    tl.atomic_add(p_sums + (PASS * kv_heads + kv_head) * DIGITS + o_digit, sums, mask=sums > 0)


@triton.jit
def tie_costs(p_key, p_cost, p_sums, p_ties, units, allowance, BLOCK: tl.constexpr):
    """Grid (Hkv, blocks): what the units whose key is the one sought cost in each block, int64 [Hkv, blocks]."""
    kv_head = tl.program_id(0)
    sought, _ = _found(p_sums, tl.num_programs(0), kv_head, allowance, PASSES)
    o_unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = kv_head.to(tl.int64) * units + o_unit
    keys = tl.load(p_key + at, mask=o_unit < units, other=0)
    costs = tl.load(p_cost + at, mask=(o_unit < units) & (keys == sought) & (keys > 0), other=0).to(tl.int64)
    tl.store(p_ties + kv_head * tl.num_programs(1) + tl.program_id(1), tl.sum(costs, 0))


@triton.jit
def mark_chosen(
    p_score,
    p_threshold,
    p_key,
    p_cost,
    p_sums,
    p_ties,
    p_zoom,
    p_chosen,
    tokens,
    units,
    allowance,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (Hkv, blocks): chosen int8 [Hkv, M], zoom int8 [Hq, T, M] as in `select_reference`."""
    kv_head, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sought, left = _found(p_sums, tl.num_programs(0), kv_head, allowance, PASSES)
    before = tl.zeros([CHUNK], tl.int64)
    for first in range(0, block, CHUNK):
        o_block = first + tl.arange(0, CHUNK)
        before += tl.load(p_ties + kv_head * blocks + o_block, mask=o_block < block, other=0)
    o_unit = block * BLOCK + tl.arange(0, BLOCK)
    there = o_unit < units
    at = kv_head.to(tl.int64) * units + o_unit
    keys = tl.load(p_key + at, mask=there, other=0)
    tied = (keys == sought) & (keys > 0)
    costs = tl.load(p_cost + at, mask=there & tied, other=0).to(tl.int64)
    spent = tl.sum(before, 0) + tl.cumsum(costs, 0)
    chosen = (keys > sought) | (tied & (spent <= left))
    tl.store(p_chosen + at, chosen.to(tl.int8), mask=there)
    for first in range(0, GROUP * tokens, ROWS):
        o_row = first + tl.arange(0, ROWS)
        live = o_row < GROUP * tokens
        rows = (kv_head * GROUP * tokens + o_row).to(tl.int64)
        least = tl.load(p_threshold + kv_head * GROUP + o_row // tokens, mask=live, other=float("inf"))
        inside = live[:, None] & there[None, :]
        scores = tl.load(p_score + rows[:, None] * units + o_unit[None, :], mask=inside, other=float("-inf"))
        zoom = (scores > least[:, None]) & (scores > float("-inf")) & chosen[None, :]
        tl.store(p_zoom + rows[:, None] * units + o_unit[None, :], zoom.to(tl.int8), mask=inside)
