"""`semkv::coarse_attention` on the device: one launch adds up weights by code, and one meets the books with their sums.

Sums by code are products: a code is two digits of 16, and the weights of the units by their upper digit, times the lower digits as zeros
and ones, are the 256 sums of a stage. Nothing is added atomically, so the same numbers give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv.kernels.calls import UnsupportedCall
from semkv.kernels.elementwise import tanh
from semkv.kernels.generation import Launch, padded
from semkv.kernels.state.numbers import CODES
from semkv.kernels.state.triton.arguments import demand, demand_counts, strides

NONE = tl.constexpr(float("-inf"))
MAX_ROWS = 16
VECTORS = 256
BLOCK, ROWS = 32, 8
"""Units at a time, and rows of queries of a program of the first launch: more would spill."""
SPLIT = 4096
"""Units of a program of the first launch."""
WIDTH, CHUNK = 64, 32
"""Numbers of a value per program of the second launch, and vectors of a book at a time."""


@triton.jit
def sum_weights(
    p_score,
    p_shift,
    p_chosen,
    p_count,
    p_codes,
    p_sums,
    p_top,
    p_mass,
    heads,
    rows,
    units,
    softcap,
    score_0,
    score_1,
    score_2,
    chosen_0,
    chosen_1,
    chosen_2,
    codes_0,
    codes_1,
    codes_2,
    STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (B * H, STAGES * blocks of rows, splits): sums float32 [splits, B * H, STAGES, R, 256] of the weights of the rest, top and mass
    float32 [splits, B * H, R]: the largest logit, and the sum of weights, which are exponentials of logits less top."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    stage = tl.program_id(1) % STAGES
    first_row = tl.program_id(1) // STAGES * ROWS
    count = tl.load(p_count + batch)
    p_score += batch * score_0 + head * score_1
    p_chosen += batch * chosen_0 + head * chosen_1
    p_codes += batch * codes_0 + head * codes_1 + stage
    o_row = first_row + tl.arange(0, ROWS)
    live = o_row < rows
    o_digit = tl.arange(0, 16)
    shift = tl.load(p_shift + tl.program_id(0).to(tl.int64) * rows + o_row, mask=live, other=0.0)
    top = tl.full([ROWS], NONE, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS * 16, 16], tl.float32)
    begin = tl.program_id(2).to(tl.int64) * SPLIT
    for first in range(0, SPLIT, BLOCK):
        o_unit = begin + first + tl.arange(0, BLOCK)
        there = (o_unit < units) & (o_unit < count)
        both = live[:, None] & there[None, :]
        logits = tl.load(p_score + o_row[:, None] * score_2 + o_unit[None, :], mask=both, other=NONE) + shift[:, None]
        if CAPPED:
            logits = softcap * tanh(logits / softcap)
        away = tl.load(p_chosen + o_row[:, None] * chosen_2 + o_unit[None, :], mask=both, other=1) > 0
        logits = tl.where(both & (away == 0), logits, NONE)
        new = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new == NONE, 0.0, new)
        factor = tl.exp(top - safe)
        weights = tl.exp(logits - safe[:, None])
        mass = mass * factor + tl.sum(weights, 1)
        top = new
        code = tl.load(p_codes + o_unit * codes_2, mask=there, other=0).to(tl.int32)
        upper = (code >> 4)[None, None, :] == o_digit[None, :, None]
        spread = tl.reshape(tl.where(upper, weights[:, None, :], 0.0), [ROWS * 16, BLOCK])
        lower = ((code & 15)[:, None] == o_digit[None, :]).to(tl.float32)
        factors = tl.reshape(tl.broadcast_to(factor[:, None], [ROWS, 16]), [ROWS * 16])
        sums = tl.dot(spread, lower, sums * factors[:, None], input_precision="tf32x3")
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    o_sum = first_row * 16 + tl.arange(0, ROWS * 16)
    at = (part * STAGES + stage) * rows * 256 + o_sum[:, None] * 16 + o_digit[None, :]
    tl.store(p_sums + at, sums, mask=(o_sum < rows * 16)[:, None])
    if stage == 0:
        tl.store(p_top + part * rows + o_row, top, mask=live)
        tl.store(p_mass + part * rows + o_row, mass, mask=live)


@triton.jit
def meet_books(
    p_sums,
    p_top,
    p_mass,
    p_books,
    p_mean,
    p_value,
    p_total,
    heads,
    rows,
    splits,
    STAGES: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * H, parts of a value): value float32 [B * H, R, DIM] and total float32 [B * H, R]; books float32 [H, STAGES, 256, DIM],
    mean float32 [H, DIM]."""
    program = tl.program_id(0).to(tl.int64)
    head, every = program % heads, tl.num_programs(0)
    o_row, o_dim = tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live, in_dim = o_row < rows, o_dim < DIM
    highest = tl.full([ROWS], NONE, tl.float32)
    for split in range(0, splits):
        at = (split * every + program) * rows + o_row
        highest = tl.maximum(highest, tl.load(p_top + at, mask=live, other=NONE))
    safe = tl.where(highest == NONE, 0.0, highest)
    mass = tl.zeros([ROWS], tl.float32)
    value = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(0, splits):
        part = split * every + program
        factor = tl.exp(tl.load(p_top + part * rows + o_row, mask=live, other=NONE) - safe)
        mass += factor * tl.load(p_mass + part * rows + o_row, mask=live, other=0.0)
    for place in range(0, STAGES * 256, CHUNK):
        o_vector = place % 256 + tl.arange(0, CHUNK)
        stage = place // 256
        sums = tl.zeros([ROWS, CHUNK], tl.float32)
        for split in range(0, splits):
            part = split * every + program
            factor = tl.exp(tl.load(p_top + part * rows + o_row, mask=live, other=NONE) - safe)
            at = ((part * STAGES + stage) * rows + o_row[:, None]) * 256 + o_vector[None, :]
            sums += factor[:, None] * tl.load(p_sums + at, mask=live[:, None], other=0.0)
        at = ((head * STAGES + stage) * 256 + o_vector)[:, None] * DIM + o_dim[None, :]
        book = tl.load(p_books + at, mask=in_dim[None, :], other=0.0)
        value = tl.dot(sums, book, value, input_precision="ieee")
    some = mass > 0.0
    mean = tl.load(p_mean + head * DIM + o_dim, mask=in_dim, other=0.0)
    value = value / tl.where(some, mass, 1.0)[:, None] + mean[None, :]
    at = (program * rows + o_row)[:, None] * DIM + o_dim[None, :]
    tl.store(p_value + at, tl.where(some[:, None], value, 0.0), mask=live[:, None] & in_dim[None, :])
    if tl.program_id(1) == 0:
        total = tl.where(some, safe + tl.log(tl.where(some, mass, 1.0)), NONE)
        tl.store(p_total + program * rows + o_row, total, mask=live)


def coarse_launches(
    score: Tensor,
    shift: Tensor,
    chosen: Tensor,
    count: Tensor,
    codes: Tensor,
    books: Tensor,
    mean: Tensor,
    softcap: float = 0.0,
    own: Tensor | None = None,
    *,
    most: int = SPLIT,
) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
    """`semkv::coarse_attention`; `most` units a program of the first launch."""
    demand("score", score, (torch.float32,))
    demand("codes", codes, CODES)
    demand_counts(count=count)
    batch, heads, queries, units = score.shape
    stages, dim = books.shape[1], books.shape[-1]
    taken = chosen if own is None else own
    demand("chosen", taken, (torch.bool,))
    if queries > MAX_ROWS or not (books.is_contiguous() and mean.is_contiguous() and shift.is_contiguous()):
        raise UnsupportedCall(f"{queries} rows of queries, or books with gaps; expected at most {MAX_ROWS}, and none")
    value, total = score.new_empty((batch, heads, queries, dim)), score.new_empty((batch, heads, queries))
    if not total.numel():
        return (value, total), []
    tile = min(ROWS, triton.next_power_of_2(queries))
    split = min(most, max(BLOCK, triton.next_power_of_2(units)))
    splits = max(1, -(-units // split))
    parts = (splits, batch * heads)
    sums = score.new_empty((*parts, stages, queries, VECTORS))
    top, mass = (score.new_empty((*parts, queries)) for _ in range(2))
    marks = taken.view(torch.int8)
    adding: dict[str, Tensor | float | None] = {
        "p_score": score,
        "p_shift": shift,
        "p_chosen": marks,
        "p_count": count,
        "p_codes": codes,
        "p_sums": sums,
        "p_top": top,
        "p_mass": mass,
        "heads": heads,
        "rows": queries,
        "units": units,
        "softcap": float(softcap),
        **strides("score", score, 3),
        **(strides("chosen", marks, 2 if own is None else 3) | ({"chosen_2": 0} if own is None else {})),
        **strides("codes", codes, 3),
    }
    meeting: dict[str, Tensor | float | None] = {
        "p_sums": sums,
        "p_top": top,
        "p_mass": mass,
        "p_books": books,
        "p_mean": mean,
        "p_value": value,
        "p_total": total,
        "heads": heads,
        "rows": queries,
        "splits": splits,
    }
    first = {"STAGES": stages, "CAPPED": int(softcap > 0), "ROWS": tile, "BLOCK": BLOCK, "SPLIT": split}
    second = {"STAGES": stages, "DIM": dim, "ROWS": padded(queries), "WIDTH": WIDTH, "CHUNK": CHUNK}
    return (value, total), [
        Launch(sum_weights, (batch * heads, stages * -(-queries // tile), splits), adding, first, max(4, tile), 1),
        Launch(meet_books, (batch * heads, -(-dim // WIDTH)), meeting, second, 4, 1),
    ]


__all__ = ["coarse_launches"]
