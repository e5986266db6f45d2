"""Mixed-resolution decode attention in C++ on a CPU: tensors as the addresses and strides that the template reads."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.addresses import address_of
from semkv.kernels.codes import code_bits
from semkv.kernels.cpp import Library, library, team
from semkv.kernels.mixed_attention.blocks import Block, segments
from semkv.kernels.mixed_attention.call import AttentionCall

TEMPLATE = Path(__file__).parent / "template.cpp"
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES = {8: 3, 4: 4}
"""How vectors are stored, as the template counts it: numbers by dtype, and codes by bits."""
LANES = 16
MAX_TILE_ROWS = 8
"""Query rows that are computed at once, at most: their sums are in registers."""
MAX_ROWS = 64
"""Query rows per KV head, at most: with more, matrix products are the faster form."""
SPLIT_ENTRIES, MAX_SPLITS = 1024, 16
"""Entries of a split, about, and splits of a KV head: sizes alone say what is split where, so that threads change no bit."""


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "where", "sinks", "slopes", "table", "out", "partial", "blocks")),
        *(
            (name, ctypes.c_int64)
            for name in ("block_count", "places", "kv_heads", "group", "tokens", "splits", "threads")
        ),
        *((name, ctypes.c_int64) for name in ("table_length", "window")),
        ("softcap", ctypes.c_double),
        ("parallel", ctypes.c_void_p),
    )


def tile_rows(group: int) -> int:
    """Query rows of a tile, for `group` query heads per KV head: all of them, or equal parts of at most `MAX_TILE_ROWS`."""
    return -(-group // -(-group // MAX_TILE_ROWS))


@cache
def attention_library(dim: int, value_dim: int, group: int) -> Library:
    """The object for these head dims and query heads per KV head; it reads every way of storing entries."""
    return library(TEMPLATE, {"DIM": dim, "VALUE_DIM": value_dim, "ROWS": tile_rows(group), "MAX_ROWS": MAX_ROWS})


def mixed_attention_cpp(*arguments: Any, **keywords: Any) -> Tensor:
    """What `mixed_attention_reference` computes of blocks, on a CPU, with its arguments; see `attend_cpp`."""
    return attend_cpp(AttentionCall.of(*arguments, **keywords))


def attend_cpp(asking: AttentionCall) -> Tensor:
    """What a call of the operator computes of blocks, on a CPU; accumulated in float32.

    Keys and values are read once, where they are and as they are; copied are only those whose numbers are not dense. `fresh` is taken
    for the operator's sake: a decode step looks at all entries.

    Raises
    ------
    BuildError: the kernel cannot be compiled. InputError: more than `MAX_ROWS` query rows per KV head, factored spans, or blocks whose
        parts are not of one size.
    """
    if asking.entries.key_u is not None:
        raise InputError("factored spans are given; expected blocks alone: use `blocked`")
    q = asking.q
    batch, q_heads, tokens, dim = q.shape
    kv_heads = asking.kv_heads
    group, places = q_heads // kv_heads, batch * kv_heads
    if group * tokens > MAX_ROWS:
        raise InputError(f"{tokens} queries for each of {group} heads of a group; expected {MAX_ROWS} rows at most")
    size, blocks = asking.value_dim, asking.blocks()
    entries = max(sum(block.k.shape[1] for block in own) for *_, own in segments(blocks, places))
    splits = min(MAX_SPLITS, entries // SPLIT_ENTRIES + 1)
    rows = tile_rows(group)
    stored = -(-group * tokens // rows) * rows * (-(-size // LANES) * LANES + 2)

    own = [_readable(block, group, tokens) for block in blocks]
    table = array("q", [number for block in own for number in _fields(block, dim, size)])
    asked = (q.float() * asking.scale).contiguous()
    where = asking.q_positions.to(torch.int64).expand(batch, tokens).contiguous()
    terms = [
        None if x is None else x.float().expand(q_heads, *x.shape[1:]).contiguous()
        for x in (asking.sinks, asking.bias_slopes, asking.bias_table)
    ]
    out, partial = (
        q.new_empty((batch, q_heads, tokens, size), dtype=torch.float32),
        asked.new_empty(places * splits * stored),
    )
    call = _Call(
        address_of("queries", asked, torch.float32, q.shape),
        address_of("positions", where, torch.int64, (batch, tokens)),
        *(None if x is None else address_of("a term of scores", x, torch.float32, x.shape) for x in terms),
        out.data_ptr(),
        partial.data_ptr(),
        table.buffer_info()[0],
        len(own),
        places,
        kv_heads,
        group,
        tokens,
        splits,
        torch.get_num_threads(),
        0 if asking.bias_table is None else asking.bias_table.shape[1],
        asking.window,
        asking.softcap,
        team(),
    )
    attention_library(dim, size, group).function("mixed_attention")(ctypes.byref(call))
    return out.to(q.dtype)


def _readable(block: Block, group: int, tokens: int) -> Block:
    """The block with dense vectors, positions of 4 or 8 bytes, and a bias float32 [h, G, T, N]; all of one size, as addresses tell none."""
    sizes = {x.shape[:2] for x in (block.k, block.v, block.k_scale, block.v_scale) if x is not None}
    if len(sizes) > 1:
        raise InputError(
            f"keys, values and scales of a block are of {sorted(map(tuple, sizes))} heads and entries; expected one size"
        )
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (block.k, block.v))
    positions = block.positions if block.positions.dtype in (torch.int32, torch.int64) else block.positions.long()
    bias = None if block.bias is None else block.bias.float().expand(k.shape[0], group, tokens, k.shape[1])
    return replace(block, k=k, v=v, positions=positions.expand(k.shape[:2]), bias=bias)


def _fields(block: Block, dim: int, value_dim: int) -> list[int]:
    """`Block` of the template."""
    of_bias = [0] * 5
    if block.bias is not None:
        bias = block.bias
        of_bias = [address_of("a bias", bias, torch.float32, bias.shape, dense=False), *bias.stride()]
    return [
        block.first,
        *block.k.shape[:2],
        *_vectors(block.k, block.k_scale, dim),
        *_vectors(block.v, block.v_scale, value_dim),
        *_addresses(block.positions),
        block.positions.element_size(),
        *of_bias,
    ]


def _vectors(x: Tensor, scale: Tensor | None, dim: int) -> list[int]:
    """`Vectors` of the template."""
    if scale is None:
        if x.dtype not in KINDS or x.shape[2] != dim:
            raise InputError(
                f"keys or values of a block are {x.dtype} with {x.shape[2]} numbers; expected {dim} of {', '.join(map(str, KINDS))}"
            )
        return [*_addresses(x), KINDS[x.dtype], 0, 0, 0]
    if scale.dtype != torch.float16:
        raise InputError(f"the scale of a block's codes is {scale.dtype}; expected torch.float16")
    return [*_addresses(x), CODES[code_bits(x, dim)], *_addresses(scale)]


def _addresses(x: Tensor) -> list[int]:
    """Where x [h, N, ...] begins, and the bytes from one place to the next and from one entry to the next."""
    size = x.element_size()
    return [address_of("a block", x, x.dtype, x.shape, dense=False), x.stride(0) * size, x.stride(1) * size]
