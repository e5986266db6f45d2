"""The instructions of a graph for inputs of given layouts: made by placing what its nodes become, and run by one call of C++."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import compress
from operator import is_not
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semkv.kernels.cpp import Library, library, team
from semkv.kernels.segments.blocks import At, Blocks, Piece, Writing, moved
from semkv.kernels.segments.emitting import CODES, Emitting
from semkv.kernels.segments.reading import Reading, filled, flat_values, made_by
from semkv.kernels.segments.scratch import scratch_offsets
from semkv.kernels.segments.values import LAYOUTS, Layout, Value, expect
from semkv.kernels.state.numbers import NUMBERS

TEMPLATE, BLOCKS = (Path(__file__).parent / name for name in ("template.cpp", "blocks.h"))


class TapeCall(ctypes.Structure):
    """`Tape` of the template."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("bases", "words", "end", "threads", "parallel"))


@cache
def segments_library() -> Library:
    """The object, one for all graphs."""
    return library(TEMPLATE, {f"OP_{name}": number for number, name in enumerate(CODES)}, [NUMBERS, BLOCKS])


def layout_of(x: Tensor) -> Layout:
    """That of an input."""
    return LAYOUTS.of(x, x.untyped_storage().filename is not None)


class Tape:
    """A graph for inputs of given layouts. It is written once: steps and threads share it.

    outputs: their layouts. size: bytes of scratch. words: where the instructions begin and end.

    Bases of values are numbers of inputs, weights behind them and outputs behind these, or ~n for the n-th buffer of scratch.
    """

    def __init__(self, reading: Reading, blocks: Blocks, inputs: Sequence[Any], kinds: Sequence[Any]) -> None:
        """blocks: those of the reading. kinds: the layouts of inputs that are tensors, in their places. Raises `UnsupportedNode`."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        expect(len(inputs) == reading.inputs, f"{len(inputs)} inputs, of {reading.inputs}")
        expect(all(x.is_cpu for x in (*tensors, *reading.weights)), "tensors that are not on a CPU")
        self._places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
        self._given = None if len(tensors) == len(inputs) else inputs
        self._layouts: list[Layout] = [kinds[place] for place in self._places]
        self._weights, self._kinds = reading.weights, [LAYOUTS.of(x) for x in reading.weights]
        self.outputs: list[Layout] = []
        self._scratch: list[Tensor] = []
        self._buffers: list[int] = []
        self._pieces: list[tuple[Piece, list[At]]] = []
        self._words = self._placed(self._read(reading, blocks, inputs))
        begin = self._words.ctypes.data
        self._run = segments_library().function("run_tape")
        self.words = (begin, begin + self._words.nbytes)

    # -- making --------------------------------------------------------------------------------------------------------

    def _read(self, reading: Reading, blocks: Blocks, inputs: Sequence[Any]) -> Any:
        """Collect the pieces of all blocks, and where their values lie; what the graph returns."""
        base = iter(range(len(self._layouts)))
        layouts = iter(self._layouts)
        values: list[Any] = [Value(next(base), 0, next(layouts)) if isinstance(x, Tensor) else x for x in inputs]
        values += [Value(len(self._layouts) + place, 0, x) for place, x in enumerate(self._kinds)]
        values += [None] * len(reading.recipes)
        for number, recipe in blocks.parts.items():
            given = [values[asked] for asked in recipe.asked]
            _, emitted = made_by(recipe, given)
            assert emitted is not None
            values[number] = moved(emitted.made, flat_values(given), 0)
        for block in blocks.blocks:
            given = [values[number] for number in block.outside]
            piece, own, first = block.piece(given), flat_values(given), len(self._buffers)
            self._buffers += piece.fresh
            fresh = [(~buffer, 0) for buffer in range(first, len(self._buffers))]
            self._pieces.append((piece, [(x.base, x.offset) for x in own] + fresh))
            for number, made in zip(block.kept, piece.made):
                values[number] = moved(made, own, first)
        return filled(reading.returned, values)

    def _placed(self, returned: Any) -> NDArray[np.int64]:
        """All words, with outputs and scratch in their places: first what each piece has to itself, then what outlives it."""
        elsewhere: dict[int, int] = {}
        self._returned = self._output(returned, elsewhere)
        uses = [[~base for base, _ in table if base < 0] for _, table in self._pieces]
        offsets, behind = scratch_offsets(self._buffers, uses, elsewhere)
        own = max((piece.own for piece, _ in self._pieces), default=0)
        self.size = own + behind
        outputs = len(self._layouts) + len(self._weights)
        scratch = outputs + len(self.outputs)
        words = [np.zeros(0, dtype=np.int64)]
        for piece, table in self._pieces:
            places = list[At]()
            for base, offset in table:
                if ~base in elsewhere:
                    base = outputs + elsewhere[~base]
                elif base < 0:
                    base, offset = scratch, offset + own + offsets[~base]
                places.append((base, offset))
            words.append(piece.placed([*places, (scratch, 0)]))
        self._pieces, self._buffers = [], []
        return np.concatenate(words)

    def _output(self, x: Any, elsewhere: dict[int, int]) -> Any:
        """A returned value as the number of its output: its buffer where it has one to itself, else a copy."""
        if isinstance(x, list):
            return [self._output(part, elsewhere) for part in x]
        if type(x) is not Value:
            return _Constant(x)
        number = len(self.outputs)
        layout = LAYOUTS.dense(x.shape, x.dtype)
        self.outputs.append(layout)
        buffer = ~x.base
        whole = x.base < 0 and x.layout is layout and layout.numel * x.dtype.itemsize == self._buffers[buffer]
        if whole and buffer not in elsewhere:
            elsewhere[buffer] = number
        else:
            out = len(self._layouts) + len(self._weights) + number
            self._pieces.append((_copying(x.layout, layout), [(x.base, x.offset), (out, 0)]))
        return number

    # -- running -------------------------------------------------------------------------------------------------------

    def given(self, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Those of the inputs that are tensors; None where the others are not the ones that the instructions are for."""
        if self._given is None:
            return inputs if len(inputs) == len(self._layouts) else None
        if len(inputs) != len(self._given) or not all(
            isinstance(x, Tensor) or x == y for x, y in zip(inputs, self._given)
        ):
            return None
        return [inputs[place] for place in self._places]

    @property
    def count(self) -> int:
        """Inputs that are tensors."""
        return len(self._layouts)

    @property
    def returns_rows(self) -> bool:
        """Whether it returns its outputs in their order, each with a first dimension of 1."""
        numbers = list(range(len(self.outputs)))
        return self._returned == numbers and all(x.shape[:1] == (1,) for x in self.outputs)

    @property
    def takes_all(self) -> bool:
        """Whether all inputs are tensors, so that places among them are those of the instructions."""
        return self._given is None

    def fits(self, place: int, x: Tensor) -> bool:
        """Whether a tensor may be input number `place`; whether it is in a file changes no number."""
        known = self._layouts[place]
        return x.is_cpu and LAYOUTS.of(x, known.in_file) is known

    def weights_at(self) -> list[int]:
        """Where the weights begin."""
        return list(map(Tensor.data_ptr, self._weights))

    def weights_fit(self) -> bool:
        """Whether the weights are as they were."""
        return all(x.is_cpu and LAYOUTS.of(x) is kind for x, kind in zip(self._weights, self._kinds))

    def run(self, addresses: list[int]) -> Any:
        """What the graph returns of inputs with these `addresses`."""
        outputs = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in self.outputs]
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = torch.empty(self.size // 4, dtype=torch.float32, device="cpu")
        table = array("q", [*addresses, *[x.data_ptr() for x in outputs], scratch.data_ptr()])
        tape = TapeCall(table.buffer_info()[0], *self.words, torch.get_num_threads(), team())
        outside = self._run(ctypes.byref(tape))
        self._scratch.append(scratch)
        check_inside(outside)
        return _filled(self._returned, outputs)


def check_inside(outside: int) -> None:
    """Raise `IndexError` where a run said 1."""
    if outside:
        raise IndexError("an index lies outside of the embedding")


class Behind(list[Tensor]):
    """The last inputs of a call. The same list again has the same tensors, with their numbers where they were: it is never changed."""


NOTHING = Behind()


class Seen:
    """The inputs that a tape was last called with: one that has its numbers where they were is not looked at again. Threads may share
    it."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._inputs: list[Any] = []
        self._at: list[int] = []
        self._held: tuple[ref[Behind], list[int]] | None = None
        self._weights_at: list[int] = []

    def addresses(self, inputs: Sequence[Any], behind: Behind) -> list[int] | None:
        """Where inputs, those of `behind` last, and weights begin; None: they are others than the instructions are for."""
        tape, held = self.tape, self._held
        known = held is not None and held[0]() is behind and len(inputs) + len(behind) == tape.count
        given = inputs if known else tape.given([*inputs, *behind])
        at = None if given is None else self._fitting(given)
        if at is None:
            return None
        if known:
            at += held[1]
        elif tape.takes_all:  # a list that is gone is no other's
            self._held = (ref(behind), at[len(inputs) :])
        weights = tape.weights_at()
        if weights != self._weights_at:
            if not tape.weights_fit():
                return None
            self._weights_at = weights
        return at + weights

    def _fitting(self, given: Sequence[Any]) -> list[int] | None:
        """Where the first tensors begin; None where one does not fit."""
        tape = self.tape
        try:
            at = [*map(Tensor.data_ptr, given)]
        except (TypeError, RuntimeError):
            return None
        if not self._inputs:
            if not all(map(tape.fits, range(len(given)), given)):
                return None
            self._inputs, self._at = [ref(x) for x in given], at
        changed = list(map(is_not, given, [seen() for seen in self._inputs[: len(at)]]))
        before = self._at[: len(at)]
        if at != before:
            changed = [is_other or x != y for is_other, x, y in zip(changed, at, before)]
        for place in compress(range(len(at)), changed):
            if not tape.fits(place, given[place]):
                return None
            self._inputs[place] = ref(given[place])
        self._at[: len(at)] = at
        return at


class _Constant:
    """In what a graph returns: what is no tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _filled(x: Any, outputs: Sequence[Tensor]) -> Any:
    if isinstance(x, list):
        return tuple([_filled(part, outputs) for part in x])
    return x.value if isinstance(x, _Constant) else outputs[x]


@cache
def _copying(x: Layout, out: Layout) -> Piece:
    """The first value copied to the second."""
    copying, writing = Emitting(), Writing()
    values = [Value(0, 0, x), Value(1, 0, out)]
    copying.copy(*values)
    writing.take(None, copying.fresh, copying.steps, values)
    return writing.piece((), len(values))


__all__ = ["NOTHING", "Behind", "Seen", "Tape", "TapeCall", "check_inside", "layout_of", "segments_library"]
