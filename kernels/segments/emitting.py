"""One node's instructions: what operators are made of (`operators.py`)."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Operator, UnsupportedCall
from semkv.kernels.segments.values import (
    ABSENT,
    DTYPES,
    FLOAT64,
    IMMEDIATE,
    ITSELF,
    LAYOUTS,
    RANK,
    Instruction,
    Patch,
    UnsupportedNode,
    Value,
    common,
    expect,
)

CODES = (
    *("CALL", "COPY", "COUNT"),
    *("ADD", "MULTIPLY", "DIVIDE", "DIVIDE_DOWN", "DIVIDE_CUT", "REMAINDER", "LEAST", "MOST", "POWER"),
    *("EQUAL", "UNEQUAL", "BELOW", "UP_TO", "ABOVE", "FROM", "BOTH", "EITHER", "ONE_OF", "NOT"),
    *("BITS_AND", "BITS_OR", "BITS_XOR", "BITS_NOT", "SHIFT_LEFT", "SHIFT_RIGHT", "WHERE"),
    *("NEGATE", "SIZE", "SIGN", "SQUARE", "CUBE", "SQUARE_ROOT", "RECIPROCAL_ROOT", "RECIPROCAL"),
    *("FLOOR", "CEILING", "ROUND", "RELU", "SINE", "COSINE", "LOGARITHM", "ERROR", "EXPONENTIAL"),
    *("TANH", "SIGMOID", "SILU", "GELU", "GELU_TANH"),
    *("SUM", "LARGEST", "SMALLEST", "ANY", "ALL", "LOG_SUM", "SUM_UP", "NORMALISE"),
    *("TAKE", "GATHER", "SCATTER", "SCATTER_ADD", "SCATTER_MOST", "SCATTER_LEAST", "SEARCH", "MATRIX"),
)
"""What the template computes."""
NUMBER = {name: place for place, name in enumerate(CODES)}
MOST_COPIED = 1 << 16
"""Numbers with gaps that are copied for a call which takes dense ones; more of them are a mistake of whoever made the graph."""

MOST_PARTS = 64
"""Instructions for tensors of more dims than one has."""

Number = bool | int | float
Given = Value | Number
"""An operand: a tensor, or a number that stands for one."""


class Emitting:
    """Collects the instructions of one node. Values that it is given have their place as base."""

    def __init__(self) -> None:
        self.fresh: list[int] = []
        self.steps: list[Instruction] = []

    # -- values --------------------------------------------------------------------------------------------------------

    def new(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Value:
        """A dense value in a buffer of its own."""
        expect(dtype in DTYPES, f"numbers of {dtype}")
        layout = LAYOUTS.dense(shape, dtype)
        self.fresh.append(layout.numel * dtype.itemsize)
        return Value(~(len(self.fresh) - 1), 0, layout)

    def view(self, x: Value, part: Tensor) -> Value:
        """What `part` is of x: both without numbers, and of one storage."""
        own = x.layout.in_file
        return Value(x.base, x.offset + int(part.storage_offset()) * part.dtype.itemsize, LAYOUTS.of(part, own))

    def expanded(self, x: Value, shape: Sequence[int]) -> Value:
        """x over `shape`."""
        return self.view(x, x.meta.expand(tuple(shape)))

    def dense(self, x: Value) -> Value:
        """x, or a copy of it where its numbers do not lie one after the other."""
        return x if x.layout.dense else self.copied(x)

    def copied(self, x: Value, dtype: torch.dtype | None = None) -> Value:
        """A dense copy."""
        out = self.new(x.shape, x.dtype if dtype is None else dtype)
        self.copy(x, out)
        return out

    def copy(self, x: Given, out: Value) -> None:
        """Write x, broadcast and in the dtype of `out`, to `out`."""
        self.apply("COPY", [x], out)

    # -- instructions --------------------------------------------------------------------------------------------------

    def apply(self, code: str, operands: Sequence[Given], out: Value, value: float = 1.0) -> Value:
        """One number of `out` for each number of the operands, which are broadcast to it."""
        _expect_numbers_fit(operands)
        wide = [self.expanded(x, out.shape) if isinstance(x, Value) else x for x in operands]
        steps = [x.layout.strides if isinstance(x, Value) else (0,) * len(out.shape) for x in wide]
        try:
            sizes, ours, *theirs = common(out.shape, out.layout.strides, *steps)
        except UnsupportedNode:
            self._apply_in_parts(code, wide, out, value)
            return out
        self.step(code, sizes, (out, ours), *zip(wide, theirs), value=value, whole=_whole((out, *operands)))
        return out

    def _apply_in_parts(self, code: str, operands: Sequence[Given], out: Value, value: float) -> None:
        """`apply` for each index of the smallest dim, where there are more dims than an instruction has."""
        size, dim = min((size, dim) for dim, size in enumerate(out.shape) if size > 1)
        expect(size <= MOST_PARTS, f"{out.shape} in parts")
        for place in range(size):
            parts = [self.view(x, x.meta.select(dim, place)) if isinstance(x, Value) else x for x in operands]
            self.apply(code, parts, self.view(out, out.meta.select(dim, place)), value)

    def step(
        self,
        code: str,
        sizes: Sequence[int],
        *operands: tuple[Given | None, Sequence[int]],
        value: float = 1.0,
        whole: bool = False,
        first: int = 0,
        second: int | float = 0,
    ) -> None:
        """operands: `out`, `a`, `b` and `c` with their strides, as many as there are."""
        words = [NUMBER[code], 0, whole, *sizes]
        patches = []
        for x, strides in (*operands, *[(None, (0,) * RANK)] * (4 - len(operands))):
            if isinstance(x, Value):
                expect(x.dtype in DTYPES, f"numbers of {x.dtype}")
                patches.append(Patch(len(words), x.base, x.offset))
                words += [0, 0, DTYPES[x.dtype], *strides]
            elif x is None:
                words += [ABSENT, 0, 0, *strides]
            else:
                kind = FLOAT64 if isinstance(x, float) else DTYPES[torch.int64]
                words += [IMMEDIATE, _bits(x) if isinstance(x, float) else int(x), kind, *strides]
        words += [_bits(value), first, _bits(second) if isinstance(second, float) else second]
        words[1] = len(words)
        self.steps.append(Instruction(array("q", words), tuple(patches)))

    def reduce(
        self, code: str, x: Value, dims: Sequence[int], keep: bool, dtype: torch.dtype, value: float = 1.0
    ) -> Value:
        """x over some of its dims."""
        rank = len(x.shape)
        over = sorted({dim % rank for dim in dims}) if rank else []
        others = [dim for dim in range(rank) if dim not in over]
        out = self.new([1 if dim in over else size for dim, size in enumerate(x.shape)], dtype)
        turned = self.view(x, x.meta.permute([*others, *over]))
        rows = _rows(turned, len(others))
        if rows is None:
            turned = self.copied(turned)
            rows = _rows(turned, len(others))
            assert rows is not None
        sizes, ours, theirs = rows
        self.step(code, sizes, (out, ours), (turned, theirs), value=value, whole=_whole((out, x)))
        return out if keep else self.view(out, out.meta.squeeze(tuple(over)))

    def call(self, call: Call, arguments: dict[str, Any]) -> list[Value]:
        """A described call of a function with these values; what it returns."""
        outputs = [self.new(shape, dtype) for shape, dtype in call.outputs]
        scratch = []
        for size in call.scratch:
            self.fresh.append(size)
            scratch.append(~(len(self.fresh) - 1))
        words, patches = [NUMBER["CALL"], 0, _entry(call), len(call.words) // 8, call.threads, call.parallel], []
        words.append(len(call.addresses))
        for word, (kind, key, offset) in call.addresses:
            if kind == "itself":
                words += [ITSELF, offset, word]
                continue
            if kind == "argument":
                base, start = arguments[key][:2]
            else:
                base, start = outputs[key][:2] if kind == "output" else (scratch[key], 0)
            patches.append(Patch(len(words), base, start + offset))
            words += [0, 0, word]
        words += array("q", call.words)
        words[1] = len(words)
        self.steps.append(Instruction(array("q", words), tuple(patches)))
        return outputs


def described(emitting: Emitting, operator: Operator, arguments: dict[str, Any], *, copies: bool = True) -> Any:
    """What an operator returns of arguments by name. copies: whether it may be given dense copies of small ones with gaps."""
    try:
        call, values = _described(operator, arguments), _flat(arguments)
    except UnsupportedCall as reason:
        copied = {name: _with_copies(emitting, x) for name, x in arguments.items()} if copies else arguments
        if copied == arguments:
            raise UnsupportedNode(str(reason)) from reason
        try:
            call, values = _described(operator, copied), _flat(copied)
        except UnsupportedCall:
            raise UnsupportedNode(str(reason)) from reason
        expect(all(_flat(arguments)[name] is values[name] for name in call.written), str(reason))
    outputs = emitting.call(call, values)
    return None if not outputs else outputs[0] if len(outputs) == 1 else outputs


def _described(operator: Operator, arguments: dict[str, Any]) -> Call:
    bare = {name: _bare(x) for name, x in arguments.items()}
    settings = {} if operator.settings is None else operator.settings({k: _stored(x) for k, x in arguments.items()})
    made = operator.describe(**bare, **settings)
    reason = made.library.failure()
    expect(reason is None, str(reason))
    return made


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """As `semkv.kernels.calls.flat`, of values."""
    made: dict[str, Any] = {}
    for name, x in arguments.items():
        many = isinstance(x, list)
        made |= {f"{name}.{place}": part for place, part in enumerate(x)} if many else {name: x}
    return made


class _Stored:
    """A tensor for the settings of an operator, which ask where it is stored."""

    def __init__(self, in_file: bool) -> None:
        self.filename = "" if in_file else None

    def untyped_storage(self) -> _Stored:
        return self


def _stored(x: Any) -> Any:
    return _Stored(x.layout.in_file) if isinstance(x, Value) else x


def _bare(x: Any) -> Any:
    """An argument with tensors without numbers."""
    if isinstance(x, Value):
        return x.meta
    return [_bare(part) for part in x] if isinstance(x, (list, tuple)) else x


def _with_copies(emitting: Emitting, x: Any) -> Any:
    """An argument with dense copies of small tensors that have gaps."""
    if isinstance(x, Value):
        return emitting.dense(x) if x.layout.numel <= MOST_COPIED else x
    return [_with_copies(emitting, part) for part in x] if isinstance(x, (list, tuple)) else x


def _entry(call: Call) -> int:
    """The address of a call's function."""
    return int(ctypes.cast(call.library.function(call.function), ctypes.c_void_p).value or 0)  # type: ignore[arg-type]


def _expect_numbers_fit(given: Sequence[Given]) -> None:
    """Refuse numbers that no instruction knows, and whole ones that PyTorch would wrap around: they become ones of the tensors' dtype."""
    kinds = [x.dtype for x in given if isinstance(x, Value) and x.dtype != torch.bool]
    for kind in kinds:
        expect(kind in DTYPES, f"numbers of {kind}")
    if not kinds or any(kind.is_floating_point for kind in kinds):
        return
    wide = torch.iinfo(max(kinds, key=lambda kind: torch.iinfo(kind).max))
    for x in given:
        if isinstance(x, int):
            expect(wide.min <= x <= wide.max, f"the number {x} beside tensors of {wide.dtype}")


def _whole(given: Sequence[Given]) -> bool:
    """Whether it is computed in whole numbers."""
    return not any(x.dtype.is_floating_point if isinstance(x, Value) else isinstance(x, float) for x in given)


def _rows(x: Value, outer: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Sizes of x as up to three dims, of its first `outer` ones, and one of all others; strides of a dense tensor of the former, and of x.
    None: its strides do not allow it."""
    shape, strides = x.shape, x.layout.strides
    rows = torch.empty(shape[:outer], dtype=torch.float32, device="meta").stride()
    try:
        (_, *inner), (_, *along) = common(shape[outer:], strides[outer:])
        (first, *sizes), (_, *ours), (_, *theirs) = common(shape[:outer], rows, strides[:outer])
    except UnsupportedNode:
        return None
    if first != 1 or inner[:2] != [1, 1]:
        return None
    return (*sizes, inner[2]), (*ours, 0), (*theirs, along[2])


def _bits(x: float) -> int:
    return struct.unpack("q", struct.pack("d", x))[0]


__all__ = ["CODES", "Emitting", "Given", "described"]
