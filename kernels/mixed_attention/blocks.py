"""Exact entries in blocks: which rows and KV heads each block is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from semkv.errors import InputError

Biases = Sequence[Tensor | None] | None


@dataclass(frozen=True)
class Block:
    """One block with its rows and KV heads in one dimension, h of them from place `first`: place = row * Hkv + KV head.

    k [h, N, D], v [h, N, Dv], positions [h|1, N]; bias [h|1, G|1, T|1, N] or None.
    """

    first: int
    k: Tensor
    v: Tensor
    positions: Tensor
    bias: Tensor | None

    @property
    def last(self) -> int:
        return self.first + self.k.shape[0]

    def of(self, first: int, last: int) -> Block:
        """The part of it that places [first, last) have."""
        if (first, last) == (self.first, self.last):
            return self
        own = slice(first - self.first, last - self.first)
        positions = self.positions if self.positions.shape[0] == 1 else self.positions[own]
        bias = self.bias if self.bias is None or self.bias.shape[0] == 1 else self.bias[own]
        return Block(first, self.k[own], self.v[own], positions, bias)


def first_places(exact_k: Sequence[Tensor], exact_heads: Sequence[int] | None) -> list[int]:
    """The first place of each block; 0 for all where `exact_heads` is None."""
    if not exact_k or (exact_heads is not None and len(exact_heads) != len(exact_k)):
        given = "None" if exact_heads is None else f"{len(exact_heads)} first places"
        raise InputError(
            f"{len(exact_k)} exact blocks and exact_heads {given}; expected at least one block, and a place for each"
        )
    return [0] * len(exact_k) if exact_heads is None else list(exact_heads)


def kv_heads_of(batch: int, q_heads: int, exact_k: Sequence[Tensor], exact_heads: Sequence[int] | None) -> int:
    """KV heads of a row, from the places that the blocks reach."""
    first = first_places(exact_k, exact_heads)
    if exact_heads is None:
        kv_heads, rest = exact_k[0].shape[1], 0  # sizes may be symbols
    else:
        kv_heads, rest = divmod(max(at + k.shape[0] * k.shape[1] for at, k in zip(first, exact_k)), batch)
    if rest or q_heads % kv_heads:
        raise InputError(f"{q_heads} query heads for {kv_heads} KV heads of {batch} rows; expected a multiple")
    return kv_heads


def flat_blocks(
    exact_k: Sequence[Tensor], exact_v: Sequence[Tensor], exact_positions: Sequence[Tensor], exact_bias: Biases,
    exact_heads: Sequence[int] | None, group: int,
) -> list[Block]:  # fmt: skip
    """Blocks as `semkv.ir.memory.Entries` has them, with rows and heads in one dimension; nothing is copied but where a
    block of several rows is not contiguous."""
    biases = [None] * len(exact_k) if exact_bias is None else exact_bias
    made = []
    for first, k, v, positions, bias in zip(
        first_places(exact_k, exact_heads), exact_k, exact_v, exact_positions, biases
    ):
        heads = k.shape[1]
        made.append(
            Block(first, k.flatten(0, 1), v.flatten(0, 1), flat_rows(positions, heads), flat_bias(bias, heads, group))
        )
    return made


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
                f"no exact block has places {first} to {last - 1}; expected one, which may be empty, for each row and head"
            )
        runs.append((first, last, own))
    return runs
