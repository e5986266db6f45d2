"""Mixed-resolution decode attention in C++ on a CPU: tensors as the addresses and strides that the template reads."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.ir.memory import Entries
from semkv.kernels.addresses import address_of
from semkv.kernels.calls import Call, Made, Operand, UnsupportedCall, demand, flat, layout_of
from semkv.kernels.codes import code_bits
from semkv.kernels.cpp import Library, library, team
from semkv.kernels.mixed_attention.blocks import Block, first_places, segments
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
MAX_DIM = 256
"""Numbers of a key or a value, at most."""
SPLIT_ENTRIES, MAX_SPLITS = 1024, 16
"""Entries of a split, about, and splits of a KV head: sizes alone say what is split where, so that threads change no bit."""
POINTERS = ("q", "where", "sinks", "slopes", "table", "out", "partial")
NUMBERS = ("block_count", "places", "kv_heads", "group", "tokens", "splits", "threads", "table_length", "window")
THREADS = len(POINTERS) + NUMBERS.index("threads")
PARALLEL = len(POINTERS) + len(NUMBERS) + 3 + 2 + 2
"""Words of `Call` of the template, whose first fields these are: strides of queries and of positions, softcap and scale come between."""

Address = Callable[[Tensor], Any]
"""What stands in a word for where a tensor begins."""


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
    q, size = asking.q, asking.value_dim
    batch, q_heads, tokens, _ = q.shape
    group = q_heads // asking.kv_heads
    if group * tokens > MAX_ROWS:
        raise InputError(f"{tokens} queries for each of {group} heads of a group; expected {MAX_ROWS} rows at most")
    blocks = [_readable(block, group, tokens) for block in asking.blocks()]
    asked = q if q.dtype == torch.float32 and q.stride(3) == 1 else q.float().contiguous()
    where = asking.q_positions.to(torch.int64).expand(batch, tokens)
    terms = [
        None if x is None else x.float().expand(q_heads, *x.shape[1:]).contiguous()
        for x in (asking.sinks, asking.bias_slopes, asking.bias_table)
    ]
    out = q.new_empty((batch, q_heads, tokens, size), dtype=torch.float32)
    partial = asked.new_empty(_partial(asking, blocks))
    words = _words(asking, asked, where, terms, blocks, (out.data_ptr(), partial.data_ptr()), _begin)
    words[THREADS], words[PARALLEL] = torch.get_num_threads(), team() or 0
    table = array("q", words)
    attention_library(q.shape[3], size, group).function("mixed_attention")(ctypes.c_void_p(table.buffer_info()[0]))
    return out.to(q.dtype)


def describe_attention(
    q: Tensor,
    q_positions: Tensor,
    *entries: Any,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    fresh: bool = False,
    kernel: str = "auto",
    layout: Sequence[int] = (),
    **named: Any,
) -> Call:
    """`semkv::mixed_attention` of blocks, for few queries in float32; the numbers of each vector lie one after the other.

    Raises
    ------
    UnsupportedCall: what `attend_cpp` would copy, or does not compute.
    """
    given = {
        "q": q,
        "q_positions": q_positions,
        **dict.fromkeys(Entries._fields),
        **dict(zip(Entries._fields, entries)),
        **named,
    }
    if fresh or kernel not in ("auto", "cpp") or given.get("key_u") is not None:
        raise UnsupportedCall("a prompt, factored spans or another kernel; expected a step that reads blocks")
    tensors = {name: _alone(x) for name, x in flat(given).items()}
    own: dict[str, Any] = {
        name: [tensors[f"{name}.{n}"] for n in range(len(x))] if isinstance(x, list) else tensors[name]
        for name, x in given.items()
    }
    names = {x.untyped_storage()._cdata: name for name, x in tensors.items() if isinstance(x, Tensor)}

    def address(x: Tensor) -> Operand:
        name = names.get(x.untyped_storage()._cdata)
        if name is None:
            raise UnsupportedCall(f"blocks whose rows and heads are not one after the other: {layout_of(x)}")
        return Operand("argument", name, int(x.storage_offset()) * x.itemsize)

    try:
        own |= _by_row(own)
        asking = AttentionCall.of(
            own.pop("q"), own.pop("q_positions"), **own, scale=scale, softcap=softcap, window=window
        )
        blocks, size = asking.blocks(), asking.value_dim
    except (InputError, RuntimeError) as reason:
        raise UnsupportedCall(str(reason)) from reason
    batch, q_heads, tokens, dim = q.shape
    group = q_heads // asking.kv_heads
    if group * tokens > MAX_ROWS or max(dim, size) > MAX_DIM:
        raise UnsupportedCall(
            f"{group * tokens} rows of queries of {dim} and {size} numbers; expected {MAX_ROWS} and {MAX_DIM} at most"
        )
    demand("q", q, [torch.float32], q.shape)
    demand("q_positions", q_positions, [torch.int64], (batch, tokens) if len(q_positions) == batch else (1, tokens))
    terms = (asking.sinks, asking.bias_slopes, asking.bias_table)
    for name, x in zip(("sinks", "bias_slopes", "bias_table"), terms):
        if x is not None:
            demand(name, x, [torch.float32], (q_heads, *x.shape[1:]), dense=True)
    for block in blocks:
        _demand_readable(block, dim, size)
    blocks = [_readable(block, group, tokens) for block in blocks]
    where = asking.q_positions.expand(batch, tokens)
    made = (Operand("output", 0), Operand("scratch", 0))
    words = _words(asking, asking.q, where, terms, blocks, made, address)
    return Call(
        attention_library(dim, size, group),
        "mixed_attention",
        array("q", [0 if isinstance(x, Operand) else x for x in words]).tobytes(),
        tuple((place, x) for place, x in enumerate(words) if isinstance(x, Operand)),
        THREADS,
        PARALLEL,
        {name: layout_of(x) for name, x in tensors.items() if isinstance(x, Tensor)},
        (Made((batch, q_heads, tokens, size), torch.float32),),
        (4 * _partial(asking, blocks),),
        (),
    )


def _alone(x: Any) -> Any:
    """A tensor without numbers in a storage of its own."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _by_row(given: dict[str, Any]) -> dict[str, Any]:
    """Blocks of single rows, in which rows and heads lie one after the other however those of a batch do."""
    firsts = first_places(given["block_k"], given["block_heads"])
    sizes = [(*k.shape[:2], first) for k, first in zip(given["block_k"], firsts)]
    made: dict[str, Any] = {"block_heads": [first + row * heads for rows, heads, first in sizes for row in range(rows)]}
    for name in ("block_k", "block_v", "block_positions", "block_bias", "block_k_scale", "block_v_scale"):
        if given[name] is not None:
            parts = zip(given[name], sizes)
            made[name] = [_row(x, row, rows) for x, (rows, *_) in parts for row in range(rows)]
    return made


def _row(x: Tensor | None, row: int, rows: int) -> Tensor | None:
    return x if x is None or x.shape[0] != rows else x[row : row + 1]


def _begin(x: Tensor) -> int:
    return address_of("a tensor", x, x.dtype, x.shape, dense=False)


def _splits(asking: AttentionCall, blocks: Sequence[Block]) -> int:
    """Parts that the entries of each place are split in."""
    places = asking.q.shape[0] * asking.kv_heads
    entries = max(sum(block.k.shape[1] for block in own) for *_, own in segments(blocks, places))
    return min(MAX_SPLITS, entries // SPLIT_ENTRIES + 1)


def _partial(asking: AttentionCall, blocks: Sequence[Block]) -> int:
    """Numbers of `partial`."""
    batch, q_heads, tokens, _ = asking.q.shape
    rows = tile_rows(q_heads // asking.kv_heads)
    stored = -(-q_heads // asking.kv_heads * tokens // rows) * rows * (-(-asking.value_dim // LANES) * LANES + 2)
    return batch * asking.kv_heads * _splits(asking, blocks) * stored


def _words(
    asking: AttentionCall,
    q: Tensor,
    where: Tensor,
    terms: Sequence[Tensor | None],
    blocks: Sequence[Block],
    made: tuple[Any, Any],
    address: Address,
) -> list[Any]:
    """`Call` of the template with its blocks; 0 for threads. made: the words of output and scratch."""
    batch, q_heads, tokens, dim = asking.q.shape
    numbers = {
        "block_count": len(blocks),
        "places": batch * asking.kv_heads,
        "kv_heads": asking.kv_heads,
        "group": q_heads // asking.kv_heads,
        "tokens": tokens,
        "splits": _splits(asking, blocks),
        "threads": 0,
        "table_length": 0 if asking.bias_table is None else asking.bias_table.shape[1],
        "window": asking.window,
    }
    words = [address(q), address(where), *(0 if x is None else address(x) for x in terms), *made]
    words += [*(numbers[name] for name in NUMBERS), *q.stride()[:3], *where.stride()]
    words += [*struct.unpack("2q", struct.pack("2d", asking.softcap, asking.scale)), 0]
    for block in blocks:
        words += _fields(block, dim, asking.value_dim, address)
    return words


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


def _demand_readable(block: Block, dim: int, value_dim: int) -> None:
    """Refuse a block that `_readable` would copy."""
    for name, x, width in (("keys", block.k, dim), ("values", block.v, value_dim)):
        scale = block.k_scale if name == "keys" else block.v_scale
        demand(name, x, (torch.uint8,) if scale is not None else tuple(KINDS), (*block.k.shape[:2], x.shape[2]))
        if scale is not None:
            demand("a scale", scale, [torch.float16], (*block.k.shape[:2], 1))
        elif x.shape[2] != width:
            raise UnsupportedCall(f"{name} of {x.shape[2]} numbers; expected {width}")
    if block.positions.dtype not in (torch.int32, torch.int64):
        raise UnsupportedCall(f"positions {block.positions.dtype}; expected torch.int32 or torch.int64")
    if block.bias is not None and block.bias.dtype != torch.float32:
        raise UnsupportedCall(f"a bias {block.bias.dtype}; expected torch.float32")


def _fields(block: Block, dim: int, value_dim: int, address: Address) -> list[Any]:
    """`Block` of the template."""
    of_bias = [0] * 5 if block.bias is None else [address(block.bias), *block.bias.stride()]
    return [
        block.first,
        *block.k.shape[:2],
        *_vectors(block.k, block.k_scale, dim, address),
        *_vectors(block.v, block.v_scale, value_dim, address),
        *_along(block.positions, address),
        block.positions.element_size(),
        *of_bias,
    ]


def _vectors(x: Tensor, scale: Tensor | None, dim: int, address: Address) -> list[Any]:
    """`Vectors` of the template."""
    if scale is None:
        if x.dtype not in KINDS or x.shape[2] != dim:
            raise InputError(
                f"keys or values of a block are {x.dtype} with {x.shape[2]} numbers; expected {dim} of {', '.join(map(str, KINDS))}"
            )
        return [*_along(x, address), KINDS[x.dtype], 0, 0, 0]
    if scale.dtype != torch.float16:
        raise InputError(f"the scale of a block's codes is {scale.dtype}; expected torch.float16")
    return [*_along(x, address), CODES[code_bits(x, dim)], *_along(scale, address)]


def _along(x: Tensor, address: Address) -> list[Any]:
    """Where x [h, N, ...] begins, and the bytes from one place to the next and from one entry to the next."""
    size = x.element_size()
    return [address(x), x.stride(0) * size, x.stride(1) * size]
