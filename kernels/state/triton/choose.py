"""`semkv::choose` and `semkv::choose_each` on the device: one launch, a program for each KV head.

A radix search, as in `semkv.kernels.selection.template`: scores become whole numbers in the same order, costs are added up by digit, the
highest digit first, and the digit at which the room runs out is the next of the score sought. What is better is chosen, and of its equals
the first ones that fit. A program goes through its head's units six times (ten where they have costs), which stay in the second cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv.kernels.calls import UnsupportedCall
from semkv.kernels.generation import Launch
from semkv.kernels.state.triton.arguments import demand, demand_counts, strides

NONE = tl.constexpr(float("-inf"))
HIGHEST = tl.constexpr(1 << 31)
BLOCK, WARPS = 2048, 8
"""Units at a time."""
COSTED_BLOCK = 256
"""Of those with costs, which are added up digit by digit."""


@triton.jit
def _wanted(p_score, o_unit, there, least):
    """Scores of units that a row wants, else -inf."""
    score = tl.load(p_score + o_unit, mask=there, other=NONE)
    return tl.where(there & (score > NONE) & (score > least), score, NONE)


@triton.jit
def _costs(p_cost, o_unit, asked, COSTED: tl.constexpr):
    """What units cost, int64, 0 where not asked."""
    if COSTED:
        return tl.load(p_cost + o_unit, mask=asked, other=0).to(tl.int64)
    else:
        return asked.to(tl.int64)


@triton.jit
def choose_units(
    p_score,
    p_count,
    p_room,
    p_threshold,
    p_cost,
    p_key,
    p_chosen,
    p_own,
    p_read,
    heads,
    rows,
    units,
    score_0,
    score_1,
    score_2,
    cost_0,
    cost_1,
    EACH: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    COSTED: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * H,): chosen int8 [B, H, M], and where EACH own int8 [B, H, R, M]; read int64 [B, H], or [B, H, R] where EACH: how many.
    key int32 [B, H, M] is scratch."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    count, room = tl.load(p_count + batch), tl.load(p_room + batch)
    p_score += batch * score_0 + head * score_1
    p_cost += batch * cost_0 + head * cost_1
    p_key += tl.program_id(0).to(tl.int64) * units
    for first in range(0, units, BLOCK):
        o_unit = first + tl.arange(0, BLOCK)
        there = (o_unit < units) & (o_unit < count)
        best = tl.full([BLOCK], NONE, tl.float32)
        for row in range(0, rows):
            least = NONE
            if THRESHOLDS:
                least = tl.load(p_threshold + head * rows + row)
            best = tl.maximum(best, _wanted(p_score + row * score_2, o_unit, there, least))
        bits = tl.where(best == 0.0, 0.0, best).to(tl.int32, bitcast=True)  # -0 and 0 are equal scores
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + HIGHEST
        key = tl.where(best == NONE, 0, key).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.store(p_key + o_unit, key, mask=o_unit < units)
    tl.debug_barrier()

    sought = tl.zeros([], tl.int64)  # digits that were found
    left = room
    digits: tl.constexpr = 1 << DIGIT_BITS
    o_digit = tl.arange(0, digits)
    for number in tl.static_range(32 // DIGIT_BITS):
        sums = tl.zeros([digits], tl.int64)
        for first in range(0, units, BLOCK):
            o_unit = first + tl.arange(0, BLOCK)
            key = tl.load(p_key + o_unit, mask=o_unit < units, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
            upper = key >> (32 - DIGIT_BITS * (number + 1))
            asked = (key > 0) & ((upper >> DIGIT_BITS) == sought)
            digit = (upper & (digits - 1)).to(tl.int32)
            if COSTED:
                costs = _costs(p_cost, o_unit, asked, COSTED)
                sums += tl.sum(tl.where(digit[:, None] == o_digit[None, :], costs[:, None], 0), 0)
            else:
                sums += tl.histogram(digit, digits, mask=asked).to(tl.int64)
        paid = tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums  # of a digit and all above
        found = tl.max(tl.where(paid > left, o_digit, 0), 0)
        left -= tl.sum(tl.where(o_digit > found, sums, 0), 0)
        sought = sought * digits + found

    spent = tl.zeros([], tl.int64)
    read = tl.zeros([], tl.int64)
    for first in range(0, units, BLOCK):
        o_unit = first + tl.arange(0, BLOCK)
        key = tl.load(p_key + o_unit, mask=o_unit < units, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        tied = (key == sought) & (key > 0)
        costs = _costs(p_cost, o_unit, tied, COSTED)
        chosen = (key > sought) | (tied & (spent + tl.cumsum(costs, 0) <= left))
        spent += tl.sum(costs, 0)
        read += tl.sum(chosen.to(tl.int64), 0)
        tl.store(p_chosen + tl.program_id(0).to(tl.int64) * units + o_unit, chosen.to(tl.int8), mask=o_unit < units)
    if not EACH:
        tl.store(p_read + tl.program_id(0), read)
    else:
        tl.debug_barrier()
        for row in range(0, rows):
            at = tl.program_id(0).to(tl.int64) * rows + row
            least = NONE
            if THRESHOLDS:
                least = tl.load(p_threshold + head * rows + row)
            read = tl.zeros([], tl.int64)
            for first in range(0, units, BLOCK):
                o_unit = first + tl.arange(0, BLOCK)
                there = (o_unit < units) & (o_unit < count)
                wants = _wanted(p_score + row * score_2, o_unit, there, least) > NONE
                p_mine = p_chosen + tl.program_id(0).to(tl.int64) * units + o_unit
                own = wants & (tl.load(p_mine, mask=o_unit < units, other=0) > 0)
                read += tl.sum(own.to(tl.int64), 0)
                tl.store(p_own + at * units + o_unit, own.to(tl.int8), mask=o_unit < units)
            tl.store(p_read + at, read)


def choose_launches(
    score: Tensor,
    count: Tensor,
    room: Tensor,
    threshold: Tensor | None = None,
    cost: Tensor | None = None,
    *,
    each: bool = False,
) -> tuple[tuple[Tensor, Tensor | None, Tensor], list[Launch]]:
    """chosen and own of `semkv::choose_each` (own None where not `each`), and how many units each KV head reads, int64 [B, H], or where
    `each` each row, [B, H, R]."""
    demand("score", score, (torch.float32,))
    demand_counts(count=count, room=room)
    batch, heads, queries, units = score.shape
    if threshold is not None and (threshold.dtype != torch.float32 or not threshold.is_contiguous()):
        raise UnsupportedCall(f"threshold {threshold.dtype} {threshold.stride()}; expected float32 without gaps")
    if cost is not None:
        demand("cost", cost, (torch.int32,))
    chosen = score.new_empty((batch, heads, units), dtype=torch.bool)
    own = score.new_empty(score.shape, dtype=torch.bool) if each else None
    read = score.new_empty((batch, heads, queries) if each else (batch, heads), dtype=torch.int64)
    if not read.numel():
        return (chosen, own, read), []
    arguments: dict[str, Tensor | float | None] = {
        "p_score": score,
        "p_count": count,
        "p_room": room,
        "p_threshold": count if threshold is None else threshold,
        "p_cost": count if cost is None else cost,
        "p_key": score.new_empty((batch, heads, units), dtype=torch.int32),
        "p_chosen": chosen.view(torch.int8),
        "p_own": chosen.view(torch.int8) if own is None else own.view(torch.int8),
        "p_read": read,
        "heads": heads,
        "rows": queries,
        "units": units,
        **strides("score", score, 3),
        **(strides("cost", cost, 2) if cost is not None else {"cost_0": 0, "cost_1": 0}),
    }
    most = BLOCK if cost is None else COSTED_BLOCK
    constants = {
        "EACH": int(each),
        "THRESHOLDS": int(threshold is not None),
        "COSTED": int(cost is not None),
        "DIGIT_BITS": 8 if cost is None else 4,
        "BLOCK": min(most, max(16, triton.next_power_of_2(units))),
    }
    return (chosen, own, read), [Launch(choose_units, (batch * heads,), arguments, constants, WARPS, 1)]


__all__ = ["choose_launches"]
