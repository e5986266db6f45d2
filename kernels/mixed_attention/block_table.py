"""Blocks of entries as a table of offsets, so that one launch reads all of them where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semkv.kernels.mixed_attention.blocks import Block, segments

PLACE_FIELDS = 3
"""Of a place: its first segment, one more than its last, and their tiles."""
FIELDS = 13
"""Of a segment: see `_fields`."""
ALIGNMENT = 16
"""Numbers that offsets of keys and values are a multiple of where the compiler may read them in vectors."""


@dataclass(frozen=True)
class BlockTable:
    """What `decode_partials` reads of blocks.

    table: int64, for each of `kinds` and each place its `PLACE_FIELDS`, then `FIELDS` of each segment. A segment is what a run of
    places has of one block; its offsets count numbers from the first element of `k`, `v` (one per kind), `positions` (int32) and
    `bias` (float32; None where no block has one). A kind is a dtype of keys and values. tiles: the most that a place has, over
    the kinds. alignment: `ALIGNMENT` or 1. held: the tensors that offsets lead to, which must outlive the launch.
    """

    table: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    positions: Tensor | None
    bias: Tensor | None
    tiles: int
    alignment: int
    held: tuple[Tensor, ...]

    @property
    def kinds(self) -> int:
        return len(self.k)


def block_table(
    blocks: Sequence[Block], places: int, group: int, tokens: int, tile: int, dtype: torch.dtype
) -> BlockTable:
    """The table of `blocks`, for `places` KV heads of all rows, `group` query heads each, in tiles of `tile` entries.

    Blocks are read as they are; copied is one whose entries are not dense, and one that is neither in the first block's dtype
    nor in that of the queries, `dtype`, which it is cast to as the products would do.
    """
    first = blocks[0].k.dtype
    own = [_readable(block, first, dtype) for block in blocks]
    runs = segments(own, places)
    full = [block for block in own if block.k.shape[1]]
    kinds = list(dict.fromkeys(_kind(block) for block in full))
    bases = {kind: next(block for block in full if _kind(block) == kind) for kind in kinds}
    biases = [block.bias for block in full if block.bias is not None]
    positions, bias = full[0].positions if full else None, biases[0] if biases else None

    heads: list[list[int]] = []
    rows: list[list[int]] = []
    tiles = [0] * len(runs)
    for kind in kinds:
        for number, (begin, end, of_run) in enumerate(runs):
            mine = [block for block in of_run if _kind(block) == kind and block.k.shape[1]]
            count = sum(-(-block.k.shape[1] // tile) for block in mine)
            heads += [[len(rows), len(rows) + len(mine), count]] * (end - begin)
            rows += [_fields(block, bases[kind], positions, bias, group, tokens) for block in mine]
            tiles[number] += count
    numbers = [x for row in (*heads, *rows) for x in row]
    device = blocks[0].k.device
    table = torch.tensor(numbers, dtype=torch.int64)
    return BlockTable(
        table=table.to(device, non_blocking=True) if device.type != "meta" else table.to(device),
        k=tuple(bases[kind].k for kind in kinds), v=tuple(bases[kind].v for kind in kinds),
        positions=positions, bias=bias, tiles=max(tiles, default=0), alignment=_alignment(rows),
        held=tuple(x for block in full for x in (block.k, block.v, block.positions, block.bias) if x is not None),
    )  # fmt: skip


def _kind(block: Block) -> tuple[torch.dtype, torch.dtype]:
    return block.k.dtype, block.v.dtype


def _readable(block: Block, first: torch.dtype, dtype: torch.dtype) -> Block:
    k, v = (_dense(x if x.dtype == first else x.to(dtype)) for x in (block.k, block.v))
    positions = block.positions.to(torch.int32)
    bias = None if block.bias is None else block.bias.float()
    return replace(
        block, k=k, v=v, positions=_last_dense(positions), bias=None if bias is None else _last_dense(bias)
    )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    """x [h, N, D] with the entries of a head one after the other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fields(
    block: Block, base: Block, positions: Tensor | None, bias: Tensor | None, group: int, tokens: int
) -> list[int]:  # fmt: skip
    """Offset and stride per place of keys, values and positions, number of entries, first place, whether there is a bias, and
    its offset and strides per place, head of the group and token."""
    assert positions is not None
    own = [
        _offset(block.k, base.k), block.k.stride(0), _offset(block.v, base.v), block.v.stride(0),
        _offset(block.positions, positions), block.positions.stride(0) if block.positions.shape[0] > 1 else 0,
        block.k.shape[1], block.first,
    ]  # fmt: skip
    if block.bias is None or bias is None:
        return [*own, 0, 0, 0, 0, 0]
    strides = block.bias.expand(block.k.shape[0], group, tokens, -1).stride()[:3]
    return [*own, 1, _offset(block.bias, bias), *strides]


def _offset(x: Tensor, base: Tensor) -> int:
    """Numbers from the first element of `base` to that of `x`, wherever they are allocated."""
    return 0 if x.device.type == "meta" else (x.data_ptr() - base.data_ptr()) // x.element_size()


def _alignment(rows: Sequence[Sequence[int]]) -> int:
    """What all offsets and strides of keys and values are a multiple of."""
    return ALIGNMENT if all(number % ALIGNMENT == 0 for row in rows for number in row[:4]) else 1
