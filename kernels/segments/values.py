"""What stands for tensors while a graph becomes instructions: layouts without numbers, and where they lie.

One node's instructions depend on its operator and on the layouts of what it is given, not on where that lies: so they are made once
(`Emitted`) and placed for every node and every tape that has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

RANK = 4
"""Dims that an instruction goes through."""
ABSENT, IMMEDIATE, ITSELF = -1, -2, -3
"""Instead of a base: nothing; a number that stands in the place of the offset; the words of the call."""
DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int64: 3,
    torch.int32: 4,
    torch.uint8: 5,
    torch.bool: 6,
}
"""`Dtype` of the template."""
FLOAT64 = 7
"""That of a number in place."""


class UnsupportedNode(Exception):
    """A node that there is no instruction for, with these sizes or dtypes."""


def expect(condition: bool, otherwise: str) -> None:
    """Raise `UnsupportedNode` where the condition does not hold."""
    if not condition:
        raise UnsupportedNode(otherwise)


class Layout:
    """Sizes, strides in numbers and dtype; one object for all that are equal (`Layouts`). in_file: whether the numbers are those of a file
    that is mapped into memory."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], in_file: bool) -> None:
        self.dtype, self.shape, self.strides, self.in_file = dtype, shape, strides, in_file

    @cached_property
    def meta(self) -> Tensor:
        """A tensor of it without numbers, with a storage of its own."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    @cached_property
    def numel(self) -> int:
        return self.meta.numel()

    @cached_property
    def dense(self) -> bool:
        """Whether its numbers lie one after the other."""
        return self.meta.is_contiguous()


class Layouts:
    """The layouts that there are."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Layout] = {}

    def of(self, x: Tensor, in_file: bool = False) -> Layout:
        """That of a tensor, wherever it is."""
        key = (x.dtype, x.shape, x.stride(), in_file)
        found = self._known.get(key)
        return self._known.setdefault(key, Layout(*key)) if found is None else found

    def dense(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Of numbers that lie one after the other."""
        return self.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


LAYOUTS = Layouts()
"""Of the process."""


class Value(NamedTuple):
    """A tensor: what it lies in, how many bytes behind where that begins, and its layout.

    base: while one node's instructions are made, the number of what the node is given, or ~n for the n-th new buffer; in a tape, see
    `Places`.
    """

    base: int
    offset: int
    layout: Layout

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def meta(self) -> Tensor:
        return self.layout.meta


class Patch(NamedTuple):
    """The words `at` and `at + 1` of an instruction are base and offset of what lies `offset` bytes behind a value's base."""

    at: int
    base: int
    offset: int


class Instruction(NamedTuple):
    """Words as the template reads them, but for what `patches` say."""

    words: array[int]
    patches: tuple[Patch, ...]


class Emitted(NamedTuple):
    """What a node becomes. made: what it returns, values among it. fresh: bytes of each new buffer."""

    made: Any
    fresh: tuple[int, ...]
    steps: tuple[Instruction, ...]


def common(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The sizes and strides of RANK dims that go through the same numbers in the same order: dims that are one for all are joined."""
    dims: list[list[int]] = []
    for size, *steps in zip(shape, *strides):
        if size == 1:
            continue
        if dims and all(before == size * step for before, step in zip(dims[-1][1:], steps)):
            dims[-1] = [dims[-1][0] * size, *steps]
        else:
            dims.append([size, *steps])
    expect(len(dims) <= RANK, f"{len(dims)} dims that cannot be joined")
    dims = [[1] + [0] * len(strides)] * (RANK - len(dims)) + dims
    return tuple(zip(*dims))
