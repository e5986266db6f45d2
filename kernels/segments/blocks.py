"""Recipes one after the other, as one piece of instructions for given layouts of what they take from outside.

A tape is put together of such pieces: where a tensor changes its size, only those are made anew that take it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from semkv.kernels.segments.reading import Reading, Recipe, flat_values, key_of, made_by, places_in, renamed
from semkv.kernels.segments.scratch import scratch_offsets
from semkv.kernels.segments.values import Instruction, Value

RECIPES = 64
"""About so many are a block: fewer are made anew sooner, and put together longer."""
MOST_PIECES = 256
"""Of layouts, that blocks of one form keep, the most recent ones."""

At = tuple[int, int]
"""A place: the base of a value, and bytes behind it."""


class Piece(NamedTuple):
    """Instructions of a block. Where they run, a table has a row (base, offset) for each value from outside, in order, for each buffer of
    `fresh`, and for what the block has to itself.

    words: as the template reads them, but that word `at` and the one behind it are table row `rows`, the offset `behind` bytes more. fresh:
    bytes of the buffers that outlive the block; own: bytes of all others while it runs. made: what its kept recipes make, with numbers of
    values from outside as bases, or ~n for the n-th of `fresh`.
    """

    words: NDArray[np.int64]
    at: NDArray[np.int64]
    rows: NDArray[np.int64]
    behind: NDArray[np.int64]
    fresh: tuple[int, ...]
    own: int
    made: tuple[Any, ...]

    def placed(self, table: Sequence[At]) -> NDArray[np.int64]:
        """The words, with the places that the table says."""
        words, places = self.words.copy(), np.array(table, dtype=np.int64).reshape(-1, 2)[self.rows]
        words[self.at] = places[:, 0]
        words[self.at + 1] = places[:, 1] + self.behind
        return words


class Writing:
    """Collects the instructions of recipes. Bases of values are numbers of what is given from outside, or ~n for the n-th buffer."""

    def __init__(self) -> None:
        self._buffers: list[int] = []
        self._steps: list[tuple[Instruction, list[At]]] = []

    def take(self, made: Any, fresh: Sequence[int], steps: Sequence[Instruction], own: Sequence[Value]) -> Any:
        """Append the steps of one recipe, whose bases are numbers of `own`; what it makes."""
        first = len(self._buffers)
        self._buffers += fresh
        for step in steps:
            self._steps.append((step, [_place(base, offset, own, first) for _, base, offset in step.patches]))
        return moved(made, own, first)

    def piece(self, made: Sequence[Any], outside: int) -> Piece:
        """All of it. outside: how many values are given."""
        kept = {~x.base: None for x in flat_values(list(made)) if x.base < 0}
        fresh = {buffer: number for number, buffer in enumerate(kept)}
        uses = [[~base for base, _ in places if base < 0] for _, places in self._steps]
        offsets, own = scratch_offsets(self._buffers, uses, fresh)
        words, at, rows, behind = list[int](), list[int](), list[int](), list[int]()
        for step, places in self._steps:
            for patch, (base, offset) in zip(step.patches, places):
                at.append(len(words) + patch.at)
                if base >= 0:
                    rows.append(base)
                elif ~base in fresh:
                    rows.append(outside + fresh[~base])
                else:
                    rows.append(outside + len(fresh))
                    offset += offsets[~base]
                behind.append(offset)
            words.extend(step.words)
        return Piece(
            words=np.array(words, dtype=np.int64),
            at=np.array(at, dtype=np.int64),
            rows=np.array(rows, dtype=np.int64),
            behind=np.array(behind, dtype=np.int64),
            fresh=tuple(self._buffers[buffer] for buffer in fresh),
            own=own,
            made=tuple(_numbered(x, fresh) for x in made),
        )


class Block:
    """Recipes of a reading, by their numbers. outside: numbers of the values that they take from elsewhere; kept: numbers of those of them
    that are `asked` for elsewhere. pieces: by form, as of layers that are alike one piece does for all."""

    def __init__(
        self, recipes: Mapping[int, Recipe], asked: Collection[int], pieces: dict[Any, dict[Any, Piece]]
    ) -> None:
        self.recipes = recipes
        taken = {number: None for recipe in recipes.values() for number in recipe.asked}
        self.outside = tuple(number for number in taken if number not in recipes)
        self.kept = tuple(number for number in recipes if number in asked)
        places = {number: place for place, number in enumerate((*self.outside, *recipes))}
        form = [(x.pattern, *[places[number] for number in x.asked]) for x in recipes.values()]
        kept = tuple(places[number] for number in self.kept)
        self._pieces = pieces.setdefault((len(self.outside), tuple(form), kept), {})

    def piece(self, given: Sequence[Any]) -> Piece:
        """That for values, numbers and lists of them such as `given`, in the order of `outside`.

        Raises
        ------
        UnsupportedNode
        """
        key = tuple([x.layout if type(x) is Value else key_of(x) for x in given])
        found = self._pieces.pop(key, None) or self._made(given)
        while len(self._pieces) >= MOST_PIECES:
            del self._pieces[next(iter(self._pieces))]
        self._pieces[key] = found
        return found

    def _made(self, given: Sequence[Any]) -> Piece:
        outside, writing = len(flat_values(list(given))), Writing()
        numbers = iter(range(outside))
        values = {number: renamed(x, numbers) for number, x in zip(self.outside, given)}
        for number, recipe in self.recipes.items():
            own = [values[asked] for asked in recipe.asked]
            values[number], emitted = made_by(recipe, own)
            if emitted is not None:
                values[number] = writing.take(emitted.made, emitted.fresh, emitted.steps, flat_values(own))
        return writing.piece([values[number] for number in self.kept], outside)


class Blocks:
    """The recipes of a reading. parts: of inputs, which take no instruction, by their numbers; blocks: all others in order, which begin
    where a recipe comes again, so that layers that are alike become blocks that are."""

    def __init__(self, reading: Reading) -> None:
        first = reading.inputs + len(reading.weights)
        numbered = list(enumerate(reading.recipes, first))
        self.parts = {
            number: recipe
            for number, recipe in numbered
            if recipe.node.target == torch.ops.aten.select.int and max(recipe.asked) < first
        }
        others = [(number, recipe) for number, recipe in numbered if number not in self.parts]
        counts = Counter(recipe.pattern for _, recipe in others)
        again = min(counts, key=lambda pattern: abs(log(len(others) / counts[pattern] / RECIPES)), default=None)
        starts = sorted({0, *(at for at, (_, recipe) in enumerate(others) if recipe.pattern == again)})
        self.blocks: list[Block] = []
        later, pieces = set(places_in(reading.returned)), dict[Any, dict[Any, Piece]]()
        for at, end in reversed(list(pairwise([*starts, len(others)]))):
            own = dict(others[at:end])
            self.blocks.insert(0, Block(own, frozenset(later), pieces))
            later.update(number for recipe in own.values() for number in recipe.asked)


def moved(x: Any, own: Sequence[Value], first: int) -> Any:
    """What a recipe has made of values `own`, in whose bases they lie now, its first buffer being number `first`."""
    if type(x) is Value:
        return Value(*_place(x.base, x.offset, own, first), x.layout)
    return [moved(part, own, first) for part in x] if isinstance(x, (list, tuple)) else x


def _place(base: int, offset: int, own: Sequence[Value], first: int) -> At:
    if base < 0:
        return base - first, offset
    return own[base].base, own[base].offset + offset


def _numbered(x: Any, fresh: dict[int, int]) -> Any:
    """x with ~n for the n-th buffer of `fresh`."""
    if type(x) is Value:
        return x if x.base >= 0 else Value(~fresh[~x.base], x.offset, x.layout)
    return [_numbered(part, fresh) for part in x] if isinstance(x, list) else x


__all__ = ["At", "Blocks", "Piece", "Writing", "moved"]
