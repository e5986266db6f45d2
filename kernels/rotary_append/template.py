"""Triton template of rotary embedding and append: a program turns one head of one token and, of keys, stores it with its value."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_and_append(
    p_q,
    p_k,
    p_v,
    p_cos,
    p_sin,
    p_where,
    p_slot,
    p_out,
    p_pool_k,
    p_pool_v,
    p_pool_places,
    tokens,
    slots,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PLACE_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Grid (B * T, Hq + Hkv): see `rotary_append_reference`; everything contiguous."""
    row, token = (tl.program_id(0) // tokens).to(tl.int64), tl.program_id(0) % tokens
    head = tl.program_id(1)
    o_half, o_dim = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_DIM)
    in_half = o_half < HALF
    first = o_half * 2 if INTERLEAVED else o_half
    second = first + 1 if INTERLEAVED else first + HALF
    kept = (o_dim >= 2 * HALF) & (o_dim < DIM)  # dimensions that are not turned
    at = (row * tokens + token) * HALF + o_half
    cos = tl.load(p_cos + at, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(p_sin + at, mask=in_half, other=0.0).to(tl.float32)
    if head < Q_HEADS:
        source = p_q + ((row * Q_HEADS + head) * tokens + token) * DIM
        a = tl.load(source + first, mask=in_half, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=in_half, other=0.0).to(tl.float32)
        target = p_out + ((row * Q_HEADS + head) * tokens + token) * DIM
        tl.store(target + first, (a * cos - b * sin).to(p_out.dtype.element_ty), mask=in_half)
        tl.store(target + second, (b * cos + a * sin).to(p_out.dtype.element_ty), mask=in_half)
        tl.store(target + o_dim, tl.load(source + o_dim, mask=kept, other=0.0), mask=kept)
    else:
        kv_head = head - Q_HEADS
        slot = tl.load(p_slot + row * tokens + token)
        if slot >= 0:
            source = p_k + ((row * KV_HEADS + kv_head) * tokens + token) * DIM
            a = tl.load(source + first, mask=in_half, other=0.0).to(tl.float32)
            b = tl.load(source + second, mask=in_half, other=0.0).to(tl.float32)
            kind = p_k.dtype.element_ty  # rounded as the model's own rotation rounds, then as the pool stores
            target = p_pool_k + (kv_head * slots.to(tl.int64) + slot) * DIM
            pool_kind = p_pool_k.dtype.element_ty
            tl.store(target + first, (a * cos - b * sin).to(kind).to(pool_kind), mask=in_half)
            tl.store(target + second, (b * cos + a * sin).to(kind).to(pool_kind), mask=in_half)
            tl.store(target + o_dim, tl.load(source + o_dim, mask=kept, other=0.0).to(pool_kind), mask=kept)
            o_value = tl.arange(0, BLOCK_VALUE)
            in_value = o_value < VALUE_DIM
            source = p_v + ((row * KV_HEADS + kv_head) * tokens + token) * VALUE_DIM
            target = p_pool_v + (kv_head * slots.to(tl.int64) + slot) * VALUE_DIM
            value = tl.load(source + o_value, mask=in_value, other=0.0)
            tl.store(target + o_value, value.to(p_pool_v.dtype.element_ty), mask=in_value)
            if kv_head < PLACE_HEADS:
                place = tl.load(p_where + row * tokens + token).to(p_pool_places.dtype.element_ty)
                tl.store(p_pool_places + kv_head * slots.to(tl.int64) + slot, place)
