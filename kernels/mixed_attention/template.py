"""Triton templates of mixed-resolution decode attention: partial softmaxes over splits of the entries, and their merge.

A program serves one KV head of one row of the batch: the query heads of its group and the tokens of the call are the rows of
one tile, so keys and values are read once per group (GQA packing). Entries of all kinds form one list of tiles, exact, coarse,
factored; a split takes a run of it and keeps one running maximum and sum over all kinds (online softmax, Milakov and Gimelshein
2018; splits with a merge, Dao et al., "Flash-Decoding", 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from semkv.kernels.elementwise import tanh


@triton.jit
def _bias_rows(row_of_batch, heads, tokens_at, Q_HEADS: tl.constexpr, TOKENS, BIAS: tl.constexpr):
    """Row [M] of a contiguous bias [B, Hq|1, T|1, N] for each query row. BIAS: 0 none, else 1 + 2 (per head) + 4 (per token)."""
    rows = row_of_batch + tl.zeros_like(heads)
    if BIAS & 2:
        rows = rows * Q_HEADS + heads
    if BIAS & 4:
        rows = rows * TOKENS + tokens_at
    return rows


@triton.jit
def _shaped(
    scores, places, there, where, live, heads, bias_rows,
    p_bias, bias_stride, o_bias, p_slopes, p_table, scale, softcap, window,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SLOPES: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Soft-cap, biases and visibility on raw scores [M, N] of entries at `places` [N], queries at `where` [M]."""
    scores = scores * scale
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    distance = where[:, None] - places[None, :]
    if SLOPES:
        slopes = tl.load(p_slopes + heads, mask=live, other=0.0).to(tl.float32)
        scores -= slopes[:, None] * distance.to(tl.float32)
    if TABLE > 0:
        index = tl.minimum(tl.maximum(distance, 0), TABLE - 1)
        scores += tl.load(p_table + heads[:, None] * TABLE + index, mask=live[:, None], other=0.0).to(tl.float32)
    if BIAS:
        bias = p_bias + bias_rows.to(tl.int64)[:, None] * bias_stride + o_bias[None, :]
        scores += tl.load(bias, mask=live[:, None] & there[None, :], other=0.0).to(tl.float32)
    visible = (distance >= 0) & there[None, :]
    if WINDOW:
        visible &= distance < window
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _absorb(scores, top, mass):
    """One step of the online softmax: weights [M, N], how much what was summed so far shrinks [M], new maximum and sum [M]."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf is NaN
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(top - base)
    return weights, shrink, new_top, mass * shrink + tl.sum(weights, 1)


@triton.jit
def decode_partials(
    p_q, p_where,
    p_exact_k, p_exact_v, p_exact_places, p_exact_bias, p_pages, p_counts,
    p_coarse_k, p_coarse_v, p_coarse_places, p_coarse_bias,
    p_key_u, p_key_s, p_key_v, p_value_u, p_value_s, p_value_v, p_factored_places, p_factored_bias,
    p_sinks, p_slopes, p_table,
    p_out, p_top, p_mass,
    tokens, exact, slots, pages, coarse, spans, length, scale, softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    EXACT_PLACES: tl.constexpr, COARSE_PLACES: tl.constexpr, FACTORED_PLACES: tl.constexpr,
    EXACT_BIAS: tl.constexpr, COARSE_BIAS: tl.constexpr, FACTORED_BIAS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_HEADS: tl.constexpr,
    COARSE: tl.constexpr, KEY_RANK: tl.constexpr, VALUE_RANK: tl.constexpr,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, TABLE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_LENGTH: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_KEY_RANK: tl.constexpr, BLOCK_VALUE_RANK: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv, blocks of rows, SPLITS). Shapes are those of `semkv.ir.memory.Entries`, all contiguous.

    *_PLACES: heads of the positions (KV_HEADS or 1). *_BIAS: see `_bias_rows`. PAGE_SIZE > 0: exact keys, values and positions lie
    in a pool of slots [Hkv, slots, D], and `p_pages` int32 [B, PAGE_HEADS, pages] and `p_counts` int32 [B] say which a row reads.
    KEY_RANK 0: no factored entries. Writes the output where SPLITS is 1, else per split the unnormalised output float32
    [SPLITS, B, Hq, T, Dv], its maximum and its sum [SPLITS, B, Hq, T].
    """
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    batch, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(2)
    kv_row = tl.program_id(0).to(tl.int64)

    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = o_row < GROUP * tokens
    heads, tokens_at = kv_head * GROUP + o_row // tokens, o_row % tokens
    o_dim, o_value = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    in_dim, in_value = o_dim < DIM, o_value < VALUE_DIM
    q_rows = (batch.to(tl.int64) * Q_HEADS + heads) * tokens + tokens_at
    b_q = tl.load(
        p_q + q_rows[:, None] * DIM + o_dim[None, :], mask=live[:, None] & in_dim[None, :], other=0.0
    )  # [M, D]
    where = tl.load(p_where + batch * tokens + tokens_at, mask=live, other=0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a sink takes mass and gives no value: once, in the first split
        sinks = tl.load(p_sinks + heads, mask=live, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sinks, top)
        mass += tl.where(split == 0, 1.0, 0.0)
    out = tl.zeros([ROWS, BLOCK_VALUE], tl.float32)

    if PAGE_SIZE > 0:
        exact_here = tl.load(p_counts + batch)
    else:
        exact_here = exact
    exact_tiles = tl.cdiv(exact_here, BLOCK)
    coarse_tiles = 0
    if COARSE:
        coarse_tiles = tl.cdiv(coarse, BLOCK)
    chunks = 1
    factored_tiles = 0
    if KEY_RANK > 0:
        chunks = tl.cdiv(length, BLOCK_LENGTH)
        factored_tiles = spans * chunks
    tiles = exact_tiles + coarse_tiles + factored_tiles
    per_split = tl.cdiv(tiles, SPLITS)
    first = split * per_split
    last = tl.minimum(first + per_split, tiles)

    bias_rows = _bias_rows(batch, heads, tokens_at, Q_HEADS, tokens, EXACT_BIAS)
    for tile in range(first, tl.minimum(last, exact_tiles)):
        o_entry = tile * BLOCK + tl.arange(0, BLOCK)
        there = o_entry < exact_here
        if PAGE_SIZE > 0:
            table = p_pages + (batch * PAGE_HEADS + (kv_head if PAGE_HEADS > 1 else 0)) * pages
            page = tl.load(table + o_entry // PAGE_SIZE, mask=there, other=0).to(tl.int64)
            o_slot = page * PAGE_SIZE + o_entry % PAGE_SIZE
            key_rows = kv_head * slots.to(tl.int64) + o_slot
            place_rows = (kv_head if EXACT_PLACES > 1 else 0) * slots.to(tl.int64) + o_slot
        else:
            key_rows = kv_row * exact + o_entry
            place_rows = (kv_row if EXACT_PLACES > 1 else batch.to(tl.int64)) * exact + o_entry
        places = tl.load(p_exact_places + place_rows, mask=there, other=0)
        b_k = tl.load(
            p_exact_k + key_rows[None, :] * DIM + o_dim[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
        )
        scores = tl.dot(b_q, b_k.to(b_q.dtype), input_precision="ieee")  # [M, N]
        scores = _shaped(
            scores, places, there, where, live, heads, bias_rows, p_exact_bias, exact, o_entry, p_slopes, p_table,
            scale, softcap, window, SOFTCAP, WINDOW, SLOPES, TABLE, EXACT_BIAS,
        )  # fmt: skip
        weights, shrink, top, mass = _absorb(scores, top, mass)
        b_v = tl.load(
            p_exact_v + key_rows[:, None] * VALUE_DIM + o_value[None, :],
            mask=there[:, None] & in_value[None, :],
            other=0.0,
        )
        out = tl.dot(weights.to(b_q.dtype), b_v.to(b_q.dtype), out * shrink[:, None], input_precision="ieee")

    if COARSE:
        bias_rows = _bias_rows(batch, heads, tokens_at, Q_HEADS, tokens, COARSE_BIAS)
        for tile in range(tl.maximum(first, exact_tiles) - exact_tiles, tl.minimum(last - exact_tiles, coarse_tiles)):
            o_entry = tile * BLOCK + tl.arange(0, BLOCK)
            there = o_entry < coarse
            key_rows = kv_row * coarse + o_entry
            place_rows = (kv_row if COARSE_PLACES > 1 else batch.to(tl.int64)) * coarse + o_entry
            places = tl.load(p_coarse_places + place_rows, mask=there, other=0)
            b_k = tl.load(
                p_coarse_k + key_rows[None, :] * DIM + o_dim[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
            )
            scores = tl.dot(b_q, b_k.to(b_q.dtype), input_precision="ieee")
            scores = _shaped(
                scores, places, there, where, live, heads, bias_rows, p_coarse_bias, coarse, o_entry, p_slopes, p_table,
                scale, softcap, window, SOFTCAP, WINDOW, SLOPES, TABLE, COARSE_BIAS,
            )  # fmt: skip
            weights, shrink, top, mass = _absorb(scores, top, mass)
            b_v = tl.load(
                p_coarse_v + key_rows[:, None] * VALUE_DIM + o_value[None, :],
                mask=there[:, None] & in_value[None, :],
                other=0.0,
            )
            out = tl.dot(weights.to(b_q.dtype), b_v.to(b_q.dtype), out * shrink[:, None], input_precision="ieee")

    if KEY_RANK > 0:
        bias_rows = _bias_rows(batch, heads, tokens_at, Q_HEADS, tokens, FACTORED_BIAS)
        o_key_rank, o_value_rank = tl.arange(0, BLOCK_KEY_RANK), tl.arange(0, BLOCK_VALUE_RANK)
        in_key_rank, in_value_rank = o_key_rank < KEY_RANK, o_value_rank < VALUE_RANK
        before = exact_tiles + coarse_tiles
        for tile in range(tl.maximum(first, before) - before, tl.minimum(last - before, factored_tiles)):
            span = tile // chunks
            o_token = (tile % chunks) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
            there = o_token < length
            factor = kv_row * spans + span
            b_right = tl.load(
                p_key_v + (factor * DIM + o_dim[:, None]) * KEY_RANK + o_key_rank[None, :],
                mask=in_dim[:, None] & in_key_rank[None, :], other=0.0,
            )  # fmt: skip
            b_s = tl.load(p_key_s + factor * KEY_RANK + o_key_rank, mask=in_key_rank, other=0.0)
            inner = tl.dot(b_q, b_right.to(b_q.dtype), input_precision="ieee") * b_s.to(tl.float32)[None, :]  # [M, R]
            b_left = tl.load(
                p_key_u + (factor * length + o_token[None, :]) * KEY_RANK + o_key_rank[:, None],
                mask=there[None, :] & in_key_rank[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(inner.to(b_q.dtype), b_left.to(b_q.dtype), input_precision="ieee")  # [M, L]
            place_row = (kv_row if FACTORED_PLACES > 1 else batch.to(tl.int64)) * spans + span
            places = tl.load(p_factored_places + place_row * length + o_token, mask=there, other=0)
            scores = _shaped(
                scores, places, there, where, live, heads, bias_rows, p_factored_bias, spans * length, span * length + o_token,
                p_slopes, p_table, scale, softcap, window, SOFTCAP, WINDOW, SLOPES, TABLE, FACTORED_BIAS,
            )  # fmt: skip
            weights, shrink, top, mass = _absorb(scores, top, mass)
            b_left = tl.load(
                p_value_u + (factor * length + o_token[:, None]) * VALUE_RANK + o_value_rank[None, :],
                mask=there[:, None] & in_value_rank[None, :], other=0.0,
            )  # fmt: skip
            b_s = tl.load(p_value_s + factor * VALUE_RANK + o_value_rank, mask=in_value_rank, other=0.0)
            inner = (
                tl.dot(weights.to(b_q.dtype), b_left.to(b_q.dtype), input_precision="ieee")
                * b_s.to(tl.float32)[None, :]
            )
            b_right = tl.load(
                p_value_v + (factor * VALUE_DIM + o_value[None, :]) * VALUE_RANK + o_value_rank[:, None],
                mask=in_value[None, :] & in_value_rank[:, None], other=0.0,
            )  # fmt: skip
            out = tl.dot(inner.to(b_q.dtype), b_right.to(b_q.dtype), out * shrink[:, None], input_precision="ieee")

    written = live[:, None] & in_value[None, :]
    if SPLITS == 1:
        out = out / mass[:, None]
        tl.store(p_out + q_rows[:, None] * VALUE_DIM + o_value[None, :], out.to(p_out.dtype.element_ty), mask=written)
    else:
        rows = split * (tl.num_programs(0) // KV_HEADS) * Q_HEADS * tokens + q_rows
        tl.store(p_out + rows[:, None] * VALUE_DIM + o_value[None, :], out, mask=written)
        tl.store(p_top + rows, top, mask=live)
        tl.store(p_mass + rows, mass, mask=live)


@triton.jit
def merge_partials(
    p_partial, p_top, p_mass, p_out, rows,
    VALUE_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Grid (rows,) with rows = B * Hq * T: partials float32 [SPLITS, rows, Dv], maxima and sums [SPLITS, rows] -> [rows, Dv]."""
    row = tl.program_id(0).to(tl.int64)
    o_split, o_value = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_VALUE)
    there, in_value = o_split < SPLITS, o_value < VALUE_DIM
    tops = tl.load(p_top + o_split.to(tl.int64) * rows + row, mask=there, other=float("-inf"))
    masses = tl.load(p_mass + o_split.to(tl.int64) * rows + row, mask=there, other=0.0)
    weights = tl.exp(tops - tl.max(tops, 0))  # a query sees an entry or a sink, so the maximum is finite
    b_partial = tl.load(
        p_partial + (o_split.to(tl.int64)[:, None] * rows + row) * VALUE_DIM + o_value[None, :],
        mask=there[:, None] & in_value[None, :], other=0.0,
    )  # fmt: skip
    out = tl.sum(b_partial * weights[:, None], 0) / tl.sum(masses * weights, 0)
    tl.store(p_out + row * VALUE_DIM + o_value, out.to(p_out.dtype.element_ty), mask=in_value)
