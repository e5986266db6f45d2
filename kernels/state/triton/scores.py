"""`semkv::scores` on the device: one launch, a program for each row of queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv.kernels.calls import UnsupportedCall
from semkv.kernels.generation import Launch
from semkv.kernels.state.triton.arguments import demand, demand_counts, strides

NONE = tl.constexpr(float("-inf"))
BLOCK, WARPS = 4096, 8
"""Units at a time."""


@triton.jit
def log_softmax_rows(
    p_logits,
    p_count,
    p_added,
    p_out,
    p_total,
    heads,
    rows,
    units,
    added_0,
    added_1,
    added_2,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * H * R,): out float32 [..., M] and total float32 [...] of logits float32 [..., M], of which row b has count[b].
    ADDED: total is more by added float32 [B, H, R]."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // (heads * rows), row // rows % heads
    count = tl.load(p_count + batch)
    p_logits += row * units
    most = tl.full([BLOCK], NONE, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, units, BLOCK):
        o_unit = first + tl.arange(0, BLOCK)
        x = tl.load(p_logits + o_unit, mask=(o_unit < units) & (o_unit < count), other=NONE)
        new = tl.maximum(most, x)
        least = tl.where(new == NONE, 0.0, new)
        mass = mass * tl.exp(most - least) + tl.exp(x - least)
        most = new
    highest = tl.max(most, 0)
    safe = tl.where(highest == NONE, 0.0, highest)
    total = tl.log(tl.sum(mass * tl.exp(most - safe), 0))
    more = 0.0
    if ADDED:
        more = tl.load(p_added + batch * added_0 + head * added_1 + row % rows * added_2)
    tl.store(p_total + row, tl.where(highest == NONE, NONE, safe + total) + more)
    for first in range(0, units, BLOCK):
        o_unit = first + tl.arange(0, BLOCK)
        there = (o_unit < units) & (o_unit < count)
        x = tl.load(p_logits + o_unit, mask=there, other=NONE)
        share = tl.where(there & (x != NONE), (x - safe) - total, NONE)
        tl.store(p_out + row * units + o_unit, share, mask=o_unit < units)


def scores_launches(
    logits: Tensor, count: Tensor, added: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
    """`semkv::scores`. added: float32 [B, H, R, 1], by which the total is more."""
    demand_counts(count=count)
    if added is not None:
        demand("added", added, (torch.float32,))
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise UnsupportedCall(f"logits {logits.dtype} {logits.stride()}; expected float32 without gaps")
    batch, heads, queries, units = logits.shape
    out, total = torch.empty_like(logits), logits.new_empty((batch, heads, queries, 1))
    if not total.numel():
        return (out, total), []
    arguments: dict[str, Tensor | float | None] = {
        "p_logits": logits,
        "p_count": count,
        "p_added": total if added is None else added,
        "p_out": out,
        "p_total": total,
        "heads": heads,
        "rows": queries,
        "units": units,
        **({"added_0": 0, "added_1": 0, "added_2": 0} if added is None else strides("added", added, 3)),
    }
    constants = {"ADDED": int(added is not None)}
    block = min(BLOCK, max(16, triton.next_power_of_2(units)))
    return (out, total), [Launch(log_softmax_rows, (total.numel(),), arguments, constants | {"BLOCK": block}, WARPS, 1)]


__all__ = ["scores_launches"]
