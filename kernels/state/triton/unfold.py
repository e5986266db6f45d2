"""`semkv::unfold_` on the device: one launch finds what comes and which slots it takes, and one copies it from where it waits.

The first has a program for each KV head, which goes through its waiting tokens and slots in order. The second reads only what is copied:
memory of the host crosses the link for that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv.ir.state_ops import EMPTY
from semkv.kernels.calls import UnsupportedCall
from semkv.kernels.generation import Launch, padded
from semkv.kernels.state.numbers import FLOATS
from semkv.kernels.state.triton.arguments import demand, demand_counts, strides

BLOCK, WARPS = 2048, 8
"""Tokens, units or slots at a time of the first launch."""
TOKENS = 16
"""Per program of the second: few, so that many programs keep the link busy."""
NOTHING = tl.constexpr(EMPTY)


@triton.jit
def _wanted(p_chosen, p_edges, o_token, waiting, units, start, length, before, EVEN: tl.constexpr):
    """Whether each number is one of a chosen unit, and the sum of edges up to the last."""
    inside = o_token < waiting
    if EVEN:
        behind = o_token - start
        there = inside & (behind >= 0) & (behind < units * length)
        wanted = tl.load(p_chosen + tl.where(there, behind // length, 0), mask=there, other=0) > 0
        return wanted, before
    else:
        edges = tl.load(p_edges + o_token, mask=inside, other=0)
        return (before + tl.cumsum(edges, 0) > 0) & inside, before + tl.sum(edges, 0)


@triton.jit
def place_tokens(
    p_chosen,
    p_slots,
    p_positions,
    p_start,
    p_shift,
    p_bounds,
    p_order,
    p_where,
    p_mark,
    p_edges,
    p_source,
    p_counts,
    heads,
    units,
    waiting,
    capacity,
    length,
    slots_0,
    slots_1,
    positions_0,
    positions_1,
    bounds_0,
    bounds_1,
    order_0,
    order_1,
    where_0,
    EVEN: tl.constexpr,
    ORDERED: tl.constexpr,
    WHERE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * H,): new slots and positions; source int32 [B, H, 2, C], of which the second half says what each slot takes, -1 where it
    takes nothing; counts int64 [B, H, 2]: tokens that come and tokens that stay. mark int8 [B, H, N] and edges int32 [B, H, N + 1], 1
    where EVEN, are scratch."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    start, shift = tl.load(p_start + batch), tl.load(p_shift + batch)
    p_chosen += program * units
    p_slots += batch * slots_0 + head * slots_1
    p_positions += batch * positions_0 + head * positions_1
    p_bounds += batch * bounds_0 + head * bounds_1
    p_order += batch * order_0 + head * order_1
    p_where += batch * where_0
    p_mark += program * waiting
    p_source += program * 2 * capacity
    p_edges += program * (waiting + 1)

    # Marks: 1 of a token that is wanted (where units are not even), 2 of one that is there.
    for first in range(0, waiting, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        tl.store(p_mark + o_token, tl.zeros([BLOCK], tl.int8), mask=o_token < waiting)
        if not EVEN:
            tl.store(p_edges + o_token, tl.zeros([BLOCK], tl.int32), mask=o_token < waiting)
    tl.debug_barrier()
    before = tl.zeros([], tl.int32)
    if not EVEN:
        for first in range(0, units, BLOCK):
            o_unit = first + tl.arange(0, BLOCK)
            chosen = tl.load(p_chosen + o_unit, mask=o_unit < units, other=0) > 0
            begin = tl.load(p_bounds + o_unit, mask=chosen, other=0)
            end = tl.load(p_bounds + o_unit + 1, mask=chosen, other=0)
            some = chosen & (begin < end)
            one = tl.full([BLOCK], 1, tl.int32)
            tl.atomic_add(p_edges + begin, one, mask=some & (begin < waiting))
            tl.atomic_add(p_edges + end, -one, mask=some & (end < waiting))
        tl.debug_barrier()
        for first in range(0, waiting, BLOCK):
            o_token = first + tl.arange(0, BLOCK)
            wanted, before = _wanted(p_chosen, p_edges, o_token, waiting, units, start, length, before, EVEN)
            place = o_token
            if ORDERED:
                place = tl.load(p_order + o_token, mask=wanted, other=0)
            tl.store(p_mark + place, tl.full([BLOCK], 1, tl.int8), mask=wanted)
        tl.debug_barrier()

    staying = tl.zeros([], tl.int64)
    for first in range(0, capacity, BLOCK):
        o_slot = first + tl.arange(0, BLOCK)
        slot = tl.load(p_slots + o_slot, mask=o_slot < capacity, other=-1)
        if EVEN:
            stays, before = _wanted(p_chosen, p_edges, slot, waiting, units, start, length, before, EVEN)
            stays = stays & (slot >= 0)
        else:
            stays = tl.load(p_mark + slot, mask=slot >= 0, other=0) == 1
        tl.store(p_mark + slot, tl.full([BLOCK], 2, tl.int8), mask=stays)
        staying += tl.sum(stays.to(tl.int64), 0)
    tl.debug_barrier()

    missing = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for first in range(0, waiting, BLOCK):
        o_token = first + tl.arange(0, BLOCK)
        wanted, before = _wanted(p_chosen, p_edges, o_token, waiting, units, start, length, before, EVEN)
        place = o_token
        if ORDERED:
            place = tl.load(p_order + o_token, mask=wanted, other=0)
        comes = wanted & (tl.load(p_mark + place, mask=wanted, other=2) != 2)
        nth = missing + tl.cumsum(comes.to(tl.int32), 0) - 1
        tl.store(p_source + nth, place, mask=comes & (nth < capacity))
        missing += tl.sum(comes.to(tl.int32), 0)
    tl.debug_barrier()

    free = tl.zeros([], tl.int32)
    copied = tl.zeros([], tl.int64)
    for first in range(0, capacity, BLOCK):
        o_slot = first + tl.arange(0, BLOCK)
        inside = o_slot < capacity
        slot = tl.load(p_slots + o_slot, mask=inside, other=-1)
        stays = tl.load(p_mark + slot, mask=slot >= 0, other=0) == 2
        empty = inside & (stays == 0)
        nth = free + tl.cumsum(empty.to(tl.int32), 0) - 1
        takes = empty & (nth < missing)
        source = tl.load(p_source + nth, mask=takes, other=-1)
        position = source + shift
        if WHERE:
            position = tl.load(p_where + source, mask=takes, other=0).to(tl.int64)
        old = tl.load(p_positions + o_slot, mask=inside, other=0)
        tl.store(
            p_positions + o_slot, tl.where(takes, position.to(tl.int32), tl.where(stays, old, NOTHING)), mask=inside
        )
        tl.store(p_slots + o_slot, tl.where(takes, source, tl.where(stays, slot, -1)), mask=inside)
        tl.store(p_source + capacity + o_slot, source, mask=inside)
        free += tl.sum(empty.to(tl.int32), 0)
        copied += tl.sum(takes.to(tl.int64), 0)
    tl.store(p_counts + 2 * program, copied)
    tl.store(p_counts + 2 * program + 1, staying)


@triton.jit
def _copy(
    p_from,
    p_by,
    p_into,
    p_scale,
    source,
    by_2,
    o_slot,
    into_2,
    scale_2,
    from_2,
    takes,
    DIM: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Vectors to their slots. FORM 0: as they are, 1: codes of 8 bits as they are, with their scales, 2: such codes as numbers."""
    o_dim = tl.arange(0, BLOCK)
    inside = takes[:, None] & (o_dim < DIM)[None, :]
    x = tl.load(p_from + source[:, None] * from_2 + o_dim[None, :], mask=inside, other=0)
    if FORM > 0:
        scale = tl.load(p_by + source * by_2, mask=takes, other=0.0)
        if FORM == 1:
            tl.store(p_scale + o_slot * scale_2, scale, mask=takes)
        else:
            x = (x.to(tl.float32) - 128.0) * scale.to(tl.float32)[:, None]
    tl.store(p_into + o_slot[:, None] * into_2 + o_dim[None, :], x.to(p_into.dtype.element_ty), mask=inside)


@triton.jit
def copy_tokens(
    p_source,
    p_counts,
    p_told,
    p_host_k,
    p_host_v,
    p_host_k_scale,
    p_host_v_scale,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    heads,
    capacity,
    host_k_0,
    host_k_1,
    host_k_2,
    host_v_0,
    host_v_1,
    host_v_2,
    host_k_scale_0,
    host_k_scale_1,
    host_k_scale_2,
    host_v_scale_0,
    host_v_scale_1,
    host_v_scale_2,
    k_0,
    k_1,
    k_2,
    v_0,
    v_1,
    v_2,
    k_scale_0,
    k_scale_1,
    k_scale_2,
    v_scale_0,
    v_scale_1,
    v_scale_2,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FORM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Grid (B * H, blocks of slots, 2): keys, then values, of what `place_tokens` says; told int64 [B, 2] is the sum of its counts."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    o_slot = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    p_source += (tl.program_id(0).to(tl.int64) * 2 + 1) * capacity
    source = tl.load(p_source + o_slot, mask=o_slot < capacity, other=-1).to(tl.int64)
    takes = source >= 0
    if tl.program_id(2) == 0:
        p_from, p_into = p_host_k + batch * host_k_0 + head * host_k_1, p_k + batch * k_0 + head * k_1
        p_by = p_host_k_scale + batch * host_k_scale_0 + head * host_k_scale_1
        p_scale = p_k_scale + batch * k_scale_0 + head * k_scale_1
        _copy(
            p_from,
            p_by,
            p_into,
            p_scale,
            source,
            host_k_scale_2,
            o_slot,
            k_2,
            k_scale_2,
            host_k_2,
            takes,
            DIM,
            FORM,
            BLOCK,
        )
        if (head == 0) & (tl.program_id(1) == 0):
            copied = tl.zeros([], tl.int64)
            stayed = tl.zeros([], tl.int64)
            for other in range(0, heads):
                copied += tl.load(p_counts + 2 * (batch * heads + other))
                stayed += tl.load(p_counts + 2 * (batch * heads + other) + 1)
            tl.store(p_told + 2 * batch, copied)
            tl.store(p_told + 2 * batch + 1, stayed)
    else:
        p_from, p_into = p_host_v + batch * host_v_0 + head * host_v_1, p_v + batch * v_0 + head * v_1
        p_by = p_host_v_scale + batch * host_v_scale_0 + head * host_v_scale_1
        p_scale = p_v_scale + batch * v_scale_0 + head * v_scale_1
        _copy(
            p_from,
            p_by,
            p_into,
            p_scale,
            source,
            host_v_scale_2,
            o_slot,
            v_2,
            v_scale_2,
            host_v_2,
            takes,
            VALUE_DIM,
            FORM,
            VALUE_BLOCK,
        )


def unfold_launches(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    chosen: Tensor,
    host_k: Tensor,
    host_v: Tensor,
    start: Tensor,
    shift: Tensor,
    length: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    host_k_scale: Tensor | None = None,
    host_v_scale: Tensor | None = None,
    bounds: Tensor | None = None,
    order: Tensor | None = None,
    where: Tensor | None = None,
) -> tuple[Tensor, list[Launch]]:
    """`semkv::unfold_`. What waits is on the device, or in page-locked memory of the host that it reads."""
    batch, heads, units = chosen.shape
    waiting, capacity = host_k.shape[2], slots.shape[2]
    form = 0 if host_k_scale is None else 1 if k_scale is not None else 2
    held, kept = ((torch.uint8,) if form > 0 else FLOATS), ((torch.uint8,) if form == 1 else FLOATS)
    for name, x, dtypes in (("k", k, kept), ("v", v, kept), ("host_k", host_k, held), ("host_v", host_v, held)):
        demand(name, x, dtypes)
    if (form == 0 and (k.dtype != host_k.dtype or v.dtype != host_v.dtype)) or (host_v_scale is None) != (form == 0):
        raise UnsupportedCall(
            f"tokens wait as {host_k.dtype} for slots of {k.dtype}; expected one dtype, or codes of 8 bits"
        )
    if not chosen.is_contiguous() or (bounds is not None and order is not None and order.shape[2] != waiting):
        raise UnsupportedCall("chosen has gaps, or an order is not of all tokens that wait; expected neither")
    demand_counts(start=start, shift=shift)
    for name, x in (("slots", slots), ("positions", positions), ("bounds", bounds), ("order", order), ("where", where)):
        if x is not None:
            demand(name, x, (torch.int32,))
    told = start.new_empty((batch, 2))
    if not batch * heads or not capacity:
        return told.zero_(), []
    counts = start.new_empty((batch, heads, 2))
    source = slots.new_empty((batch, heads, 2, capacity))
    even = bounds is None
    tables = {"slots": slots, "positions": positions, "bounds": bounds, "order": order}
    finding: dict[str, Tensor | float | None] = {
        "p_chosen": chosen.view(torch.int8),
        "p_slots": slots,
        "p_positions": positions,
        "p_start": start,
        "p_shift": shift,
        "p_bounds": slots if bounds is None else bounds,
        "p_order": slots if order is None else order,
        "p_where": slots if where is None else where,
        "p_mark": slots.new_empty((batch, heads, max(1, waiting)), dtype=torch.int8),
        "p_edges": slots.new_empty((batch, heads, 1 if even else waiting + 1)),
        "p_source": source,
        "p_counts": counts,
        "heads": heads,
        "units": units,
        "waiting": waiting,
        "capacity": capacity,
        "length": max(1, length),
    }
    for name, x in tables.items():
        finding |= {f"{name}_0": 0, f"{name}_1": 0} if x is None else strides(name, x, 2)
    finding |= {"where_0": 0} if where is None else strides("where", where, 1)
    most = max(waiting, capacity, units)
    constants = {
        "EVEN": int(even),
        "ORDERED": int(order is not None and not even),
        "WHERE": int(where is not None),
        "BLOCK": min(BLOCK, max(16, triton.next_power_of_2(most))),
    }
    parts = {
        "host_k": host_k,
        "host_v": host_v,
        "host_k_scale": host_k_scale,
        "host_v_scale": host_v_scale,
        "k": k,
        "v": v,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    copying: dict[str, Tensor | float | None] = {"p_source": source, "p_counts": counts, "p_told": told}
    copying |= {f"p_{name}": k if x is None else x for name, x in parts.items()}
    copying |= {"heads": heads, "capacity": capacity}
    for name, x in parts.items():
        copying |= {f"{name}_{axis}": 0 for axis in range(3)} if x is None else strides(name, x, 3)
    sizes = {
        "DIM": k.shape[3],
        "VALUE_DIM": v.shape[3],
        "FORM": form,
        "TOKENS": TOKENS,
        "BLOCK": padded(k.shape[3]),
        "VALUE_BLOCK": padded(v.shape[3]),
    }
    grid = (batch * heads, -(-capacity // TOKENS), 2)
    return told, [
        Launch(place_tokens, (batch * heads,), finding, constants, WARPS, 1),
        Launch(copy_tokens, grid, copying, sizes, 4, 1),
    ]


__all__ = ["unfold_launches"]
