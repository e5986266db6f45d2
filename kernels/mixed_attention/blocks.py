"""Entries in blocks: which rows and KV heads each block is of, and how its keys and values are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.ir.memory import Entries
from semkv.kernels.codes import code_bits

PerBlock = Sequence[Tensor | None] | None
"""Of each block a tensor or None; None for all of them."""


class Kind(NamedTuple):
    """How a block's keys and values are stored: their dtypes, and the bits of codes, 0 where they are plain numbers."""

    k: torch.dtype
    v: torch.dtype
    k_bits: int
    v_bits: int


@dataclass(frozen=True)
class Block:
    """One block with its rows and KV heads in one dimension, h of them from place `first`: place = row * Hkv + KV head.

    k [h, N, D], v [h, N, Dv], positions [h|1, N]; bias [h|1, G|1, T|1, N] or None. k_scale, v_scale: float16 [h, N, 1] where keys or
    values are packed codes uint8 [h, N, width] (`semkv.kernels.codes`) of k_bits or v_bits, else None, and 0 bits.
    """

    first: int
    k: Tensor
    v: Tensor
    positions: Tensor
    bias: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_bits: int = 0
    v_bits: int = 0

    @cached_property
    def kind(self) -> Kind:
        return Kind(self.k.dtype, self.v.dtype, self.k_bits, self.v_bits)

    @property
    def last(self) -> int:
        return self.first + self.k.shape[0]

    def of(self, first: int, last: int) -> Block:
        """The part of it that places [first, last) have."""
        if (first, last) == (self.first, self.last):
            return self
        own = slice(first - self.first, last - self.first)
        positions, bias = (x if x is None or x.shape[0] == 1 else x[own] for x in (self.positions, self.bias))
        k_scale, v_scale = (None if x is None else x[own] for x in (self.k_scale, self.v_scale))
        return Block(first, self.k[own], self.v[own], positions, bias, k_scale, v_scale, self.k_bits, self.v_bits)

    def entries(self, own: slice) -> Block:
        """The entries `own` of it."""
        bias = None if self.bias is None else self.bias[..., own]
        k_scale, v_scale = (None if x is None else x[:, own] for x in (self.k_scale, self.v_scale))
        return replace(
            self,
            k=self.k[:, own],
            v=self.v[:, own],
            positions=self.positions[:, own],
            bias=bias,
            k_scale=k_scale,
            v_scale=v_scale,
        )


def first_places(block_k: Sequence[Tensor], block_heads: Sequence[int] | None) -> list[int]:
    """The first place of each block; 0 for all where `block_heads` is None."""
    if not block_k or (block_heads is not None and len(block_heads) != len(block_k)):
        given = "None" if block_heads is None else f"{len(block_heads)} first places"
        raise InputError(
            f"{len(block_k)} blocks and block_heads {given}; expected at least one block, and a place for each"
        )
    return [0] * len(block_k) if block_heads is None else list(block_heads)


def kv_heads_of(batch: int, q_heads: int, block_k: Sequence[Tensor], block_heads: Sequence[int] | None) -> int:
    """KV heads of a row, from the places that the blocks reach."""
    first = first_places(block_k, block_heads)
    if block_heads is None:
        kv_heads, rest = block_k[0].shape[1], 0  # sizes may be symbols
    else:
        kv_heads, rest = divmod(max(at + k.shape[0] * k.shape[1] for at, k in zip(first, block_k)), batch)
    if rest or q_heads % kv_heads:
        raise InputError(f"{q_heads} query heads for {kv_heads} KV heads of {batch} rows; expected a multiple")
    return kv_heads


def flat_blocks(entries: Entries, group: int, dim: int, value_dim: int) -> list[Block]:
    """The blocks of `entries` with rows and heads in one dimension; nothing is copied but where a block of several rows is not
    contiguous. dim, value_dim: numbers of a key and of a value, D and Dv.

    Raises
    ------
    InputError: keys or values that are neither plain numbers nor codes of those sizes.
    """
    made, count = [], len(entries.block_k)
    for first, k, v, positions, bias, k_scale, v_scale in zip(
        first_places(entries.block_k, entries.block_heads),
        entries.block_k,
        entries.block_v,
        entries.block_positions,
        *(each(x, count) for x in (entries.block_bias, entries.block_k_scale, entries.block_v_scale)),
    ):
        k_bits, v_bits = _bits(k, k_scale, dim), _bits(v, v_scale, value_dim)
        heads = k.shape[1]
        k_scale, v_scale = (None if scale is None else scale.flatten(0, 1) for scale in (k_scale, v_scale))
        where, own = flat_rows(positions, heads), flat_bias(bias, heads, group)
        made.append(Block(first, k.flatten(0, 1), v.flatten(0, 1), where, own, k_scale, v_scale, k_bits, v_bits))
    return made


def each(given: PerBlock, count: int) -> Sequence[Tensor | None]:
    """What `given` says of `count` blocks."""
    return [None] * count if given is None else given


def _bits(x: Tensor, scale: Tensor | None, dim: int) -> int:
    """Bits of the codes of a block's keys or values, 0 where they are plain numbers; `dim` numbers each."""
    if scale is not None:
        return code_bits(x, dim)
    if not x.is_floating_point() or x.shape[-1] != dim:
        raise InputError(
            f"keys or values of a block are {x.dtype} with {x.shape[-1]} numbers; expected {dim} floating-point ones, or codes with "
            "their scale"
        )
    return 0


def flat_rows(x: Tensor, heads: int) -> Tensor:
    """x [B, heads|1, ...] -> [B * heads, ...], or [1, ...] where one row and head stands for all."""
    return x[0] if x.shape[:2] == (1, 1) else x.expand(-1, heads, *x.shape[2:]).flatten(0, 1)


def flat_bias(bias: Tensor | None, heads: int, group: int) -> Tensor | None:
    """bias [B, heads * G|1, T|1, ...] -> [B * heads|1, G|1, T|1, ...]."""
    if bias is None:
        return None
    shared = bias.shape[1] == 1
    return flat_rows(bias[:, :, None] if shared else bias.unflatten(1, (heads, group)), heads)


def segments(blocks: Sequence[Block], places: int) -> list[tuple[int, int, list[Block]]]:
    """Runs of places [first, last) that have the same blocks, in order, and those blocks cut to them."""
    if all(block.k.shape[0] == places for block in blocks):
        return [(0, places, list(blocks))]
    edges = sorted({0, places, *(edge for block in blocks for edge in (block.first, block.last))})
    runs = []
    for first, last in pairwise(edges):
        own = [block.of(first, last) for block in blocks if block.first <= first and last <= block.last]
        if not own:
            raise InputError(
                f"no block has places {first} to {last - 1}; expected one, which may be empty, for each row and head"
            )
        runs.append((first, last, own))
    return runs
