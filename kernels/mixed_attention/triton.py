"""Mixed-resolution decode attention on the device: what is launched for given tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch, padded
from semkv.kernels.mixed_attention.block_table import FIELDS, PLACE_FIELDS, BlockTable, block_table
from semkv.kernels.mixed_attention.blocks import flat_blocks
from semkv.kernels.mixed_attention.call import DTYPES, AttentionCall
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.cpp import MAX_ROWS
from semkv.kernels.mixed_attention.paged import PagedTokens
from semkv.kernels.mixed_attention.template import decode_partials, merge_partials

MAX_SPLITS = 128
PER_PROCESSOR = 8
"""Programs for each multiprocessor: two to four of them are there at once, and loads of many hide what each waits for."""
TILE_NBYTES = 1 << 16
"""Bytes of the keys and values of a tile, at most: shared memory of every GPU since sm_80 has room for them."""


def splits_for(programs: int, tiles: int, processors: int) -> int:
    """A power of two of splits that makes of `programs` about `PER_PROCESSOR` for each multiprocessor, of which at most half have no
    tile."""
    wanted = min(-(-PER_PROCESSOR * processors // programs), MAX_SPLITS)
    return min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(max(1, tiles)))


def block_for(dims: tuple[int, int], dtype: torch.dtype, *, plain: bool) -> int:
    """Entries per tile, `dims` numbers of a key and of a value: 128 where they take at most `TILE_NBYTES`, else 64 or 32; where not all
    are `plain` numbers in `dtype`, 32, as products of codes and of factors need the registers."""
    if not plain:
        return 32
    return next((size for size in (128, 64) if size * sum(map(padded, dims)) * dtype.itemsize <= TILE_NBYTES), 32)


LAYOUT = ("paged", "paged_bias", "configuration")
"""Arguments of `launches` besides the call."""


def mixed_attention_launches(*arguments: Any, **keywords: Any) -> tuple[Tensor, list[Launch]]:
    """`launches` of the arguments of `mixed_attention_reference`; by name also those of `LAYOUT`."""
    own = {name: keywords.pop(name) for name in LAYOUT if name in keywords}
    return launches(AttentionCall.of(*arguments, **keywords), **own)


def launches(
    call: AttentionCall,
    paged: PagedTokens | None = None,
    paged_bias: Tensor | None = None,
    configuration: Configuration | None = None,
) -> tuple[Tensor, list[Launch]]:
    """The output [B, Hq, T, Dv] and the launches that write it; nothing runs yet, so tensors may be on `meta`.

    `paged` tokens come besides or in place of blocks, with their bias [B, Hq|1, T|1, capacity]. Blocks are read where they are, see
    `block_table`.
    """
    q, own = call.q, call.entries
    if q.dtype not in DTYPES:
        raise InputError(
            f"q is {q.dtype}; the kernel computes in float16, bfloat16 or float32: cast it, or use `blocked`"
        )
    configuration = configuration or Configuration()
    batch, q_heads, tokens, dim = q.shape
    plain = own.key_u is None and own.block_k_scale is None and own.block_v_scale is None
    if not own.block_k and paged is None:
        raise InputError("neither blocks nor `paged` tokens are given; expected at least one of them")
    heads = {call.kv_heads} if own.block_k else set()
    heads |= set() if paged is None else {paged.k.shape[0]}
    kv_heads, *others = heads
    if others or q_heads % kv_heads:
        raise InputError(
            f"{q_heads} query heads for {' or '.join(map(str, sorted(heads)))} KV heads; expected a multiple"
        )
    group = q_heads // kv_heads
    size = call.value_dim if paged is None else paged.v.shape[-1]
    block = configuration.block or block_for((dim, size), q.dtype, plain=plain)
    table = None
    if own.block_k:
        blocks = flat_blocks(own, group, dim, size)
        table = block_table(blocks, batch * kv_heads, group, tokens, block, (dim, size), q.dtype)
    spans, length = (0, 1) if own.key_u is None else own.key_u.shape[2:4]
    key_rank, value_rank = (0, 0) if own.key_u is None else (own.key_u.shape[-1], own.value_u.shape[-1])

    rows = min(MAX_ROWS, padded(group * tokens))
    block_length = min(block, padded(length))
    programs = batch * kv_heads * -(-group * tokens // rows)
    tiles = (0 if paged is None else -(-paged.capacity // block)) + spans * -(-length // block_length)
    tiles += 0 if table is None else table.tiles
    splits = configuration.splits or splits_for(programs, tiles, _processors(q.device))

    out = q.new_empty((batch, q_heads, tokens, size))
    partial, top, mass = out, None, None
    if splits > 1:
        partial = q.new_empty((splits, *out.shape), dtype=torch.float32)
        top, mass = (q.new_empty((splits, *out.shape[:-1]), dtype=torch.float32) for _ in range(2))

    def dense(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    def of_kind(tensors: str, kind: int) -> Tensor | None:
        return getattr(table, tensors)[kind] if table is not None and kind < len(table.kinds) else None

    values: dict[str, Tensor | float | None] = {
        "p_q": dense(q),
        "p_where": dense(call.q_positions),
        "p_blocks": None if table is None else table.table,
        "p_k": of_kind("k", 0),
        "p_v": of_kind("v", 0),
        "p_other_k": of_kind("k", 1),
        "p_other_v": of_kind("v", 1),
        "p_scale": None if table is None else table.scale,
        "p_places": None if table is None else table.positions,
        "p_bias": None if table is None else table.bias,
        "p_paged_k": None if paged is None else dense(paged.k),
        "p_paged_v": None if paged is None else dense(paged.v),
        "p_paged_places": None if paged is None else dense(paged.positions),
        "p_paged_bias": dense(paged_bias),
        "p_pages": None if paged is None else dense(paged.pages),
        "p_counts": None if paged is None else dense(paged.counts),
        "p_key_u": dense(own.key_u),
        "p_key_s": dense(own.key_s),
        "p_key_v": dense(own.key_v),
        "p_value_u": dense(own.value_u),
        "p_value_s": dense(own.value_s),
        "p_value_v": dense(own.value_v),
        "p_factored_places": dense(own.factored_positions),
        "p_factored_bias": dense(own.factored_bias),
        "p_sinks": dense(call.sinks),
        "p_slopes": dense(call.bias_slopes),
        "p_table": dense(call.bias_table),
        "p_out": partial,
        "p_top": top,
        "p_mass": mass,
        "tokens": tokens,
        "slots": 0 if paged is None else paged.k.shape[1],
        "pages": 0 if paged is None else paged.pages.shape[-1],
        "spans": spans,
        "length": length,
        "scale": float(call.scale),
        "softcap": float(call.softcap),
        "window": call.window,
    }
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "VALUE_DIM": size,
        "KINDS": 0 if table is None else len(table.kinds),
        "PLACE_FIELDS": PLACE_FIELDS,
        "FIELDS": FIELDS,
        "BIAS": int(table is not None and table.bias is not None),
        **_kind_constants(table, 0, ""),
        **_kind_constants(table, 1, "OTHER_"),
        "PAGE_SIZE": 0 if paged is None else paged.page_size,
        "PAGE_HEADS": 0 if paged is None else paged.pages.shape[1],
        "PAGED_PLACES": 0 if paged is None else paged.positions.shape[0],
        "PAGED_BIAS": _rows_of(paged_bias),
        "KEY_RANK": key_rank,
        "VALUE_RANK": value_rank,
        "FACTORED_PLACES": 0 if own.factored_positions is None else own.factored_positions.shape[1],
        "FACTORED_BIAS": _rows_of(own.factored_bias),
        "SINKS": int(call.sinks is not None),
        "SLOPES": int(call.bias_slopes is not None),
        "TABLE": 0 if call.bias_table is None else call.bias_table.shape[1],
        "SOFTCAP": int(call.softcap != 0),
        "WINDOW": int(call.window != 0),
        "SPLITS": splits,
        "ROWS": rows,
        "BLOCK": block,
        "BLOCK_LENGTH": block_length,
        "BLOCK_DIM": padded(dim),
        "BLOCK_VALUE": padded(size),
        "BLOCK_KEY_RANK": padded(key_rank),
        "BLOCK_VALUE_RANK": padded(value_rank),
    }
    grid = (batch * kv_heads, -(-group * tokens // rows), splits)
    registers = configuration.registers or (255 if plain else 168)
    held = () if table is None else table.held
    made = [
        Launch(
            decode_partials,
            grid,
            values,
            constants,
            configuration.warps,
            configuration.stages,
            registers,
            held,
        )
    ]
    if splits > 1:
        count = batch * q_heads * tokens
        merged: dict[str, Tensor | float | None] = {
            "p_partial": partial,
            "p_top": top,
            "p_mass": mass,
            "p_out": out,
            "rows": count,
        }
        sizes = {
            "VALUE_DIM": size,
            "SPLITS": splits,
            "BLOCK_SPLITS": triton.next_power_of_2(splits),
            "BLOCK_VALUE": padded(size),
        }
        made.append(Launch(merge_partials, (count,), merged, sizes, 4, 1))
    return out, made


def mixed_attention_triton(*arguments: Any, **keywords: Any) -> Tensor:
    """What `mixed_attention_reference` computes, on the device of `q`; arguments are those of `mixed_attention_launches`."""
    out, made = mixed_attention_launches(*arguments, **keywords)
    for launch in made:
        launch.run()
    return out


def attend_triton(call: AttentionCall, configuration: Configuration) -> Tensor:
    """What a call of the operator computes, on the device of `q`; accumulated in float32.

    `fresh` is taken for the operator's sake: a decode step looks at all entries. Tensors that are not contiguous are copied.
    """
    out, made = launches(call, configuration=configuration)
    for launch in made:
        launch.run()
    return out


def _kind_constants(table: BlockTable | None, number: int, prefix: str) -> dict[str, int]:
    """How the blocks of one kind are stored, as constants whose names begin with `prefix`."""
    if table is None or number >= len(table.kinds):
        k_bits, v_bits, alignment = 0, 0, 1
    else:
        (_, _, k_bits, v_bits), alignment = table.kinds[number], table.alignment[number]
    return {f"{prefix}K_BITS": k_bits, f"{prefix}V_BITS": v_bits, f"{prefix}ALIGNMENT": alignment}


def _rows_of(bias: Tensor | None) -> int:
    """The BIAS constant of a bias [B, Hq|1, T|1, ...]."""
    return 0 if bias is None else 1 + 2 * (bias.shape[1] > 1) + 4 * (bias.shape[2] > 1)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
