"""Blocks of entries as a table of offsets, so that one launch reads all of them where they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semkv.kernels.codes import rebuilt
from semkv.kernels.mixed_attention.blocks import Block, Kind, segments
from semkv.kernels.tables import sent

PLACE_FIELDS = 3
"""Of a place: its first segment, one more than its last, and their tiles."""
FIELDS = 17
"""Of a segment: see `_fields`."""
MAX_KINDS = 2
"""Kinds of blocks that one launch reads."""
ALIGNMENT = 16
"""Numbers that offsets of keys and values are a multiple of where the compiler may read them in vectors."""


@dataclass(frozen=True)
class BlockTable:
    """What `decode_partials` reads of blocks.

    table: int64, for each of `kinds` and each place its `PLACE_FIELDS`, then `FIELDS` of each segment. A segment is what a run of
    places has of one block; its offsets count elements from the first one of `k`, `v` (one per kind), `positions` (int32), `bias`
    (float32) and `scale` (float16); None where no block has one. tiles: the most that a place has, over the kinds. alignment: per
    kind `ALIGNMENT` or 1. held: the tensors that offsets lead to, which must outlive the launch.
    """

    table: Tensor
    kinds: tuple[Kind, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    positions: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    tiles: int
    alignment: tuple[int, ...]
    held: tuple[Tensor, ...]


def block_table(
    blocks: Sequence[Block], places: int, group: int, tokens: int, tile: int, dims: tuple[int, int], dtype: torch.dtype
) -> BlockTable:
    """The table of `blocks`, for `places` KV heads of all rows, `group` query heads each, in tiles of `tile` entries; `dims` are the
    numbers of a key and of a value.

    Blocks are read as they are, of `MAX_KINDS` kinds at most: where there are more, all but those of the first block's become plain
    numbers in the queries' `dtype`. Copied is also a block whose entries are not dense.
    """
    own = [_readable(block) for block in blocks]
    kinds = list(dict.fromkeys(block.kind for block in own if block.k.shape[1]))
    if len(kinds) > MAX_KINDS:
        own = [block if block.kind == kinds[0] else _plain(block, dims, dtype) for block in own]
        kinds = list(dict.fromkeys(block.kind for block in own if block.k.shape[1]))
    runs = segments(own, places)
    full = [block for block in own if block.k.shape[1]]
    bases = {kind: next(block for block in full if block.kind == kind) for kind in kinds}
    origin = _Origin(
        _first(block.positions for block in full),
        _first(block.bias for block in full),
        _first(x for block in full for x in (block.k_scale, block.v_scale)),
    )

    heads: list[list[int]] = []
    rows: list[list[int]] = []
    alignment: list[int] = []
    tiles = [0] * len(runs)
    for kind in kinds:
        before = len(rows)
        for number, (begin, end, of_run) in enumerate(runs):
            mine = [block for block in of_run if block.k.shape[1] and block.kind == kind]
            count = sum(-(-block.k.shape[1] // tile) for block in mine)
            heads += [[len(rows), len(rows) + len(mine), count]] * (end - begin)
            rows += [_fields(block, bases[kind], origin, group, tokens) for block in mine]
            tiles[number] += count
        alignment.append(_alignment(rows[before:]))
    numbers = [x for row in (*heads, *rows) for x in row]
    device = blocks[0].k.device
    return BlockTable(
        table=sent(numbers, device),
        kinds=tuple(kinds),
        k=tuple(bases[kind].k for kind in kinds),
        v=tuple(bases[kind].v for kind in kinds),
        positions=origin.positions,
        bias=origin.bias,
        scale=origin.scale,
        tiles=max(tiles, default=0),
        alignment=tuple(alignment),
        held=tuple(x for block in full for x in vars(block).values() if isinstance(x, Tensor)),
    )


class _Origin(NamedTuple):
    """What offsets of all kinds count from."""

    positions: Tensor | None
    bias: Tensor | None
    scale: Tensor | None


def _first(given: Iterable[Tensor | None]) -> Tensor | None:
    """The first that there is."""
    return next((x for x in given if x is not None), None)


def _plain(block: Block, dims: tuple[int, int], dtype: torch.dtype) -> Block:
    """The block in plain numbers of `dtype`."""
    k = rebuilt(block.k, block.k_scale, block.k_bits, dims[0]) if block.k_scale is not None else block.k
    v = rebuilt(block.v, block.v_scale, block.v_bits, dims[1]) if block.v_scale is not None else block.v
    return Block(block.first, _dense(k.to(dtype)), _dense(v.to(dtype)), block.positions, block.bias)


def _readable(block: Block) -> Block:
    """The block with what the kernel counts on: dense entries, positions int32, bias float32, scales float16."""
    made = {"k": _dense(block.k), "v": _dense(block.v), "positions": _last_dense(block.positions.to(torch.int32))}
    made |= {} if block.bias is None else {"bias": _last_dense(block.bias.float())}
    made |= {} if block.k_scale is None else {"k_scale": _dense(block.k_scale.half())}
    made |= {} if block.v_scale is None else {"v_scale": _dense(block.v_scale.half())}
    changed: dict[str, Any] = {name: x for name, x in made.items() if x is not getattr(block, name)}
    return replace(block, **changed) if changed else block


def _dense(x: Tensor) -> Tensor:
    """x [h, N, D] with the entries of a head one after the other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fields(block: Block, base: Block, origin: _Origin, group: int, tokens: int) -> list[int]:
    """Offset and stride per place of keys, values and positions, number of entries, first place; offset and stride per place of the
    scales of keys and of values; whether there is a bias, and its offset and strides per place, head of the group and token."""
    assert origin.positions is not None
    own = [
        _offset(block.k, base.k),
        block.k.stride(0),
        _offset(block.v, base.v),
        block.v.stride(0),
        _offset(block.positions, origin.positions),
        block.positions.stride(0) if block.positions.shape[0] > 1 else 0,
        block.k.shape[1],
        block.first,
    ]
    for scale in (block.k_scale, block.v_scale):
        own += [0, 0] if scale is None or origin.scale is None else [_offset(scale, origin.scale), scale.stride(0)]
    if block.bias is None or origin.bias is None:
        return [*own, 0, 0, 0, 0, 0]
    strides = block.bias.expand(block.k.shape[0], group, tokens, -1).stride()[:3]
    return [*own, 1, _offset(block.bias, origin.bias), *strides]


def _offset(x: Tensor, base: Tensor) -> int:
    """Numbers from the first element of `base` to that of `x`, wherever they are allocated."""
    return 0 if x.device.type == "meta" else (x.data_ptr() - base.data_ptr()) // x.element_size()


def _alignment(rows: Sequence[Sequence[int]]) -> int:
    """What all offsets and strides of the keys and values of segments are a multiple of."""
    return ALIGNMENT if all(number % ALIGNMENT == 0 for row in rows for number in row[:4]) else 1
