"""Triton templates of mixed-resolution decode attention: partial softmaxes over splits of the entries, and their merge.

A program serves one KV head of one row of the batch: the query heads of its group and the tokens of the call are the rows of
one tile, so keys and values are read once per group (GQA packing). Entries of all kinds form one list of tiles, paged, in
blocks, factored; a split takes a run of it and keeps one running maximum and sum over all kinds (online softmax, Milakov and Gimelshein
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
    return rows.to(tl.int64)


@triton.jit
def _shaped(
    scores,
    places,
    there,
    where,
    live,
    heads,
    bias_at,
    biased,
    p_bias,
    o_bias,
    p_slopes,
    p_table,
    scale,
    softcap,
    window,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOPES: tl.constexpr,
    TABLE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Soft-cap, biases and visibility on raw scores [M, N] of entries at `places` [N], queries at `where` [M].

    A query's biases begin at `bias_at` [M]; they are read where `biased`.
    """
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
        bias = p_bias + bias_at[:, None] + o_bias[None, :]
        scores += tl.load(bias, mask=(live & biased)[:, None] & there[None, :], other=0.0).to(tl.float32)
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
def _levels(p_codes, o_number, there, BITS: tl.constexpr):
    """What packed codes stand for before their scale, float32: the numbers `o_number` of vectors whose first bytes are at `p_codes`."""
    PER_BYTE: tl.constexpr = 8 // BITS
    raw = tl.load(p_codes + o_number // PER_BYTE, mask=there, other=0)
    if PER_BYTE > 1:
        raw = (raw >> (BITS * (o_number % PER_BYTE)).to(tl.uint8)) & ((1 << BITS) - 1)
    return (raw - (1 << (BITS - 1))).to(tl.int8, bitcast=True).to(tl.float32)  # wraps around


@triton.jit
def _attend_blocks(
    out,
    top,
    mass,
    b_q,
    where,
    live,
    heads,
    group_at,
    tokens_at,
    place,
    first,
    last,
    before,
    p_place,
    p_segments,
    p_k,
    p_v,
    p_scale,
    p_places,
    p_bias,
    p_slopes,
    p_table,
    scale,
    softcap,
    window,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    FIELDS: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOPES: tl.constexpr,
    TABLE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The softmax carried on over what tiles [first, last) have of one place's blocks, whose own tiles begin at `before`.

    `p_place`: the place's row of a `block_table.BlockTable`, `p_segments`: its first segment. K_BITS, V_BITS: of codes, whose scales
    are at `p_scale`; 0: plain numbers.
    """
    K_WIDTH: tl.constexpr = DIM if K_BITS == 0 else (DIM * K_BITS + 7) // 8
    V_WIDTH: tl.constexpr = VALUE_DIM if V_BITS == 0 else (VALUE_DIM * V_BITS + 7) // 8
    o_dim, o_value = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    in_dim, in_value = o_dim < DIM, o_value < VALUE_DIM
    for segment in range(tl.load(p_place).to(tl.int32), tl.load(p_place + 1).to(tl.int32)):
        p_fields = p_segments + segment * FIELDS
        count = tl.load(p_fields + 6).to(tl.int32)
        at = place - tl.load(p_fields + 7)  # of the segment's places
        k_at = tl.multiple_of(tl.load(p_fields) + at * tl.load(p_fields + 1), ALIGNMENT)
        v_at = tl.multiple_of(tl.load(p_fields + 2) + at * tl.load(p_fields + 3), ALIGNMENT)
        places_at = tl.load(p_fields + 4) + at * tl.load(p_fields + 5)
        if K_BITS > 0:
            k_scale_at = tl.load(p_fields + 8) + at * tl.load(p_fields + 9)
        if V_BITS > 0:
            v_scale_at = tl.load(p_fields + 10) + at * tl.load(p_fields + 11)
        p_own_bias, bias_at, biased = p_bias, tokens_at, live
        if BIAS:
            biased = live & (tl.load(p_fields + 12) + tl.zeros_like(tokens_at) != 0)
            p_own_bias = p_bias + (tl.load(p_fields + 13) + at * tl.load(p_fields + 14))
            bias_at = group_at * tl.load(p_fields + 15).to(tl.int32) + tokens_at * tl.load(p_fields + 16).to(tl.int32)
        tiles = tl.cdiv(count, BLOCK)
        for tile in range(tl.maximum(first - before, 0), tl.minimum(last - before, tiles)):
            o_entry = tile * BLOCK + tl.arange(0, BLOCK)
            there = o_entry < count
            places = tl.load(p_places + places_at + o_entry, mask=there, other=0)
            in_keys = there[None, :] & in_dim[:, None]
            if K_BITS > 0:
                b_k = _levels(p_k + k_at + o_entry[None, :] * K_WIDTH, o_dim[:, None], in_keys, K_BITS)
            else:
                b_k = tl.load(p_k + k_at + o_entry[None, :] * K_WIDTH + o_dim[:, None], mask=in_keys, other=0.0)
            scores = tl.dot(b_q, b_k.to(b_q.dtype), input_precision="ieee")  # [M, N]
            if K_BITS > 0:
                scores *= tl.load(p_scale + k_scale_at + o_entry, mask=there, other=0.0).to(tl.float32)[None, :]
            scores = _shaped(
                scores,
                places,
                there,
                where,
                live,
                heads,
                bias_at,
                biased,
                p_own_bias,
                o_entry,
                p_slopes,
                p_table,
                scale,
                softcap,
                window,
                SOFTCAP,
                WINDOW,
                SLOPES,
                TABLE,
                BIAS,
            )
            weights, shrink, top, mass = _absorb(scores, top, mass)
            in_values = there[:, None] & in_value[None, :]
            if V_BITS > 0:  # the scale goes to the values: times it, small weights would leave float16
                b_v = _levels(p_v + v_at + o_entry[:, None] * V_WIDTH, o_value[None, :], in_values, V_BITS)
                b_v *= tl.load(p_scale + v_scale_at + o_entry, mask=there, other=0.0).to(tl.float32)[:, None]
            else:
                b_v = tl.load(p_v + v_at + o_entry[:, None] * V_WIDTH + o_value[None, :], mask=in_values, other=0.0)
            out = tl.dot(weights.to(b_q.dtype), b_v.to(b_q.dtype), out * shrink[:, None], input_precision="ieee")
        before += tiles
    return out, top, mass


@triton.jit
def decode_partials(
    p_q,
    p_where,
    p_blocks,
    p_k,
    p_v,
    p_other_k,
    p_other_v,
    p_scale,
    p_places,
    p_bias,
    p_paged_k,
    p_paged_v,
    p_paged_places,
    p_paged_bias,
    p_pages,
    p_counts,
    p_key_u,
    p_key_s,
    p_key_v,
    p_value_u,
    p_value_s,
    p_value_v,
    p_factored_places,
    p_factored_bias,
    p_sinks,
    p_slopes,
    p_table,
    p_out,
    p_top,
    p_mass,
    tokens,
    slots,
    pages,
    spans,
    length,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KINDS: tl.constexpr,
    PLACE_FIELDS: tl.constexpr,
    FIELDS: tl.constexpr,
    BIAS: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    OTHER_K_BITS: tl.constexpr,
    OTHER_V_BITS: tl.constexpr,
    OTHER_ALIGNMENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGED_PLACES: tl.constexpr,
    PAGED_BIAS: tl.constexpr,
    KEY_RANK: tl.constexpr,
    VALUE_RANK: tl.constexpr,
    FACTORED_PLACES: tl.constexpr,
    FACTORED_BIAS: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    TABLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_KEY_RANK: tl.constexpr,
    BLOCK_VALUE_RANK: tl.constexpr,
):
    """Grid (B * Hkv, blocks of rows, SPLITS). Shapes are those of `semkv.ir.memory.Entries`.

    Exact and coarse entries come in blocks of KINDS kinds (0: none), which lie where `p_blocks` says (see
    `block_table.BlockTable`); keys and values of the second kind count from `p_other_k` and `p_other_v`. PAGE_SIZE > 0: exact
    keys, values and positions lie in a pool of slots [Hkv, slots, D], and `p_pages` int32 [B, PAGE_HEADS, pages] and `p_counts`
    int32 [B] say which a row reads. KEY_RANK 0: no factored entries; they are contiguous. *_PLACES: heads of the positions
    (KV_HEADS or 1). *_BIAS: see `_bias_rows`; BIAS: whether a block has one. Writes the output where SPLITS is 1, else per split
    the unnormalised output float32 [SPLITS, B, Hq, T, Dv], its maximum and its sum [SPLITS, B, Hq, T].
    """
    Q_HEADS: tl.constexpr = KV_HEADS * GROUP
    places = tl.num_programs(0)
    batch, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(2)
    kv_row = tl.program_id(0).to(tl.int64)

    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = o_row < GROUP * tokens
    group_at, tokens_at = o_row // tokens, o_row % tokens
    heads = kv_head * GROUP + group_at
    o_dim, o_value = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    in_dim, in_value = o_dim < DIM, o_value < VALUE_DIM
    q_rows = (batch.to(tl.int64) * Q_HEADS + heads) * tokens + tokens_at
    b_q = tl.load(
        p_q + q_rows[:, None] * DIM + o_dim[None, :], mask=live[:, None] & in_dim[None, :], other=0.0
    )  # [M, D]
    where = tl.load(p_where + batch * tokens + tokens_at, mask=live, other=0).to(tl.int32)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a sink takes mass and gives no value: once, in the first split
        sinks = tl.load(p_sinks + heads, mask=live, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sinks, top)
        mass += tl.where(split == 0, 1.0, 0.0)
    out = tl.zeros([ROWS, BLOCK_VALUE], tl.float32)

    paged_tiles = 0
    if PAGE_SIZE > 0:
        paged = tl.load(p_counts + batch)
        paged_tiles = tl.cdiv(paged, BLOCK)
    own_tiles = 0
    other_tiles = 0
    if KINDS > 0:
        p_place = p_blocks + kv_row * PLACE_FIELDS
        p_segments = p_blocks + KINDS * places * PLACE_FIELDS
        own_tiles = tl.load(p_place + 2).to(tl.int32)
    if KINDS > 1:
        p_other_place = p_place + places * PLACE_FIELDS
        other_tiles = tl.load(p_other_place + 2).to(tl.int32)
    chunks = 1
    factored_tiles = 0
    if KEY_RANK > 0:
        chunks = tl.cdiv(length, BLOCK_LENGTH)
        factored_tiles = spans * chunks
    before = paged_tiles + own_tiles + other_tiles
    tiles = before + factored_tiles
    per_split = tl.cdiv(tiles, SPLITS)
    first = split * per_split
    last = tl.minimum(first + per_split, tiles)

    if PAGE_SIZE > 0:
        bias_at = _bias_rows(batch, heads, tokens_at, Q_HEADS, tokens, PAGED_BIAS) * pages * PAGE_SIZE
        for tile in range(first, tl.minimum(last, paged_tiles)):
            o_entry = tile * BLOCK + tl.arange(0, BLOCK)
            there = o_entry < paged
            table = p_pages + (batch * PAGE_HEADS + (kv_head if PAGE_HEADS > 1 else 0)) * pages
            page = tl.load(table + o_entry // PAGE_SIZE, mask=there, other=0).to(tl.int64)
            o_slot = page * PAGE_SIZE + o_entry % PAGE_SIZE
            key_rows = kv_head * slots.to(tl.int64) + o_slot
            place_rows = (kv_head if PAGED_PLACES > 1 else 0) * slots.to(tl.int64) + o_slot
            entry_places = tl.load(p_paged_places + place_rows, mask=there, other=0).to(tl.int32)
            b_k = tl.load(
                p_paged_k + key_rows[None, :] * DIM + o_dim[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
            )
            scores = tl.dot(b_q, b_k.to(b_q.dtype), input_precision="ieee")
            scores = _shaped(
                scores,
                entry_places,
                there,
                where,
                live,
                heads,
                bias_at,
                live,
                p_paged_bias,
                o_entry,
                p_slopes,
                p_table,
                scale,
                softcap,
                window,
                SOFTCAP,
                WINDOW,
                SLOPES,
                TABLE,
                PAGED_BIAS,
            )
            weights, shrink, top, mass = _absorb(scores, top, mass)
            b_v = tl.load(
                p_paged_v + key_rows[:, None] * VALUE_DIM + o_value[None, :],
                mask=there[:, None] & in_value[None, :],
                other=0.0,
            )
            out = tl.dot(weights.to(b_q.dtype), b_v.to(b_q.dtype), out * shrink[:, None], input_precision="ieee")

    if KINDS > 0:
        out, top, mass = _attend_blocks(
            out,
            top,
            mass,
            b_q,
            where,
            live,
            heads,
            group_at,
            tokens_at,
            kv_row,
            first,
            last,
            paged_tiles,
            p_place,
            p_segments,
            p_k,
            p_v,
            p_scale,
            p_places,
            p_bias,
            p_slopes,
            p_table,
            scale,
            softcap,
            window,
            DIM,
            VALUE_DIM,
            BLOCK,
            BLOCK_DIM,
            BLOCK_VALUE,
            FIELDS,
            K_BITS,
            V_BITS,
            ALIGNMENT,
            SOFTCAP,
            WINDOW,
            SLOPES,
            TABLE,
            BIAS,
        )
    if KINDS > 1:
        out, top, mass = _attend_blocks(
            out,
            top,
            mass,
            b_q,
            where,
            live,
            heads,
            group_at,
            tokens_at,
            kv_row,
            first,
            last,
            paged_tiles + own_tiles,
            p_other_place,
            p_segments,
            p_other_k,
            p_other_v,
            p_scale,
            p_places,
            p_bias,
            p_slopes,
            p_table,
            scale,
            softcap,
            window,
            DIM,
            VALUE_DIM,
            BLOCK,
            BLOCK_DIM,
            BLOCK_VALUE,
            FIELDS,
            OTHER_K_BITS,
            OTHER_V_BITS,
            OTHER_ALIGNMENT,
            SOFTCAP,
            WINDOW,
            SLOPES,
            TABLE,
            BIAS,
        )

    if KEY_RANK > 0:
        bias_at = _bias_rows(batch, heads, tokens_at, Q_HEADS, tokens, FACTORED_BIAS) * spans * length
        o_key_rank, o_value_rank = tl.arange(0, BLOCK_KEY_RANK), tl.arange(0, BLOCK_VALUE_RANK)
        in_key_rank, in_value_rank = o_key_rank < KEY_RANK, o_value_rank < VALUE_RANK
        for tile in range(tl.maximum(first, before) - before, tl.minimum(last - before, factored_tiles)):
            span = tile // chunks
            o_token = (tile % chunks) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
            there = o_token < length
            factor = kv_row * spans + span
            b_right = tl.load(
                p_key_v + (factor * DIM + o_dim[:, None]) * KEY_RANK + o_key_rank[None, :],
                mask=in_dim[:, None] & in_key_rank[None, :],
                other=0.0,
            )
            b_s = tl.load(p_key_s + factor * KEY_RANK + o_key_rank, mask=in_key_rank, other=0.0)
            inner = tl.dot(b_q, b_right.to(b_q.dtype), input_precision="ieee") * b_s.to(tl.float32)[None, :]  # [M, R]
            b_left = tl.load(
                p_key_u + (factor * length + o_token[None, :]) * KEY_RANK + o_key_rank[:, None],
                mask=there[None, :] & in_key_rank[:, None],
                other=0.0,
            )
            scores = tl.dot(inner.to(b_q.dtype), b_left.to(b_q.dtype), input_precision="ieee")  # [M, L]
            place_row = (kv_row if FACTORED_PLACES > 1 else batch.to(tl.int64)) * spans + span
            entry_places = tl.load(p_factored_places + place_row * length + o_token, mask=there, other=0).to(tl.int32)
            scores = _shaped(
                scores,
                entry_places,
                there,
                where,
                live,
                heads,
                bias_at,
                live,
                p_factored_bias,
                span * length + o_token,
                p_slopes,
                p_table,
                scale,
                softcap,
                window,
                SOFTCAP,
                WINDOW,
                SLOPES,
                TABLE,
                FACTORED_BIAS,
            )
            weights, shrink, top, mass = _absorb(scores, top, mass)
            b_left = tl.load(
                p_value_u + (factor * length + o_token[:, None]) * VALUE_RANK + o_value_rank[None, :],
                mask=there[:, None] & in_value_rank[None, :],
                other=0.0,
            )
            b_s = tl.load(p_value_s + factor * VALUE_RANK + o_value_rank, mask=in_value_rank, other=0.0)
            inner = (
                tl.dot(weights.to(b_q.dtype), b_left.to(b_q.dtype), input_precision="ieee")
                * b_s.to(tl.float32)[None, :]
            )
            b_right = tl.load(
                p_value_v + (factor * VALUE_DIM + o_value[None, :]) * VALUE_RANK + o_value_rank[:, None],
                mask=in_value[None, :] & in_value_rank[:, None],
                other=0.0,
            )
            out = tl.dot(inner.to(b_q.dtype), b_right.to(b_q.dtype), out * shrink[:, None], input_precision="ieee")

    written = live[:, None] & in_value[None, :]
    if SPLITS == 1:
        out = out / mass[:, None]
        tl.store(p_out + q_rows[:, None] * VALUE_DIM + o_value[None, :], out.to(p_out.dtype.element_ty), mask=written)
    else:
        rows = split * (places // KV_HEADS) * Q_HEADS * tokens + q_rows
        tl.store(p_out + rows[:, None] * VALUE_DIM + o_value[None, :], out, mask=written)
        tl.store(p_top + rows, top, mask=live)
        tl.store(p_mass + rows, mass, mask=live)


@triton.jit
def merge_partials(
    p_partial,
    p_top,
    p_mass,
    p_out,
    rows,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Grid (rows,) with rows = B * Hq * T: partials float32 [SPLITS, rows, Dv], maxima and sums [SPLITS, rows] -> [rows, Dv]."""
    row = tl.program_id(0).to(tl.int64)
    o_split, o_value = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_VALUE)
    there, in_value = o_split < SPLITS, o_value < VALUE_DIM
    tops = tl.load(p_top + o_split.to(tl.int64) * rows + row, mask=there, other=float("-inf"))
    masses = tl.load(p_mass + o_split.to(tl.int64) * rows + row, mask=there, other=0.0)
    weights = tl.exp(tops - tl.max(tops, 0))  # a query sees an entry or a sink, so the maximum is finite
    b_partial = tl.load(
        p_partial + (o_split.to(tl.int64)[:, None] * rows + row) * VALUE_DIM + o_value[None, :],
        mask=there[:, None] & in_value[None, :],
        other=0.0,
    )
    out = tl.sum(b_partial * weights[:, None], 0) / tl.sum(masses * weights, 0)
    tl.store(p_out + row * VALUE_DIM + o_value, out.to(p_out.dtype.element_ty), mask=in_value)
