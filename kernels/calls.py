"""A call of a function in C++ described once, from layouts of tensors: to run alone, or within a list that C++ goes through.

Such a function takes the address of one structure, whose fields have 8 bytes each: addresses, whole numbers, `double`s, and `threads` and
`parallel` (threads.h). All but addresses and threads follow from sizes, strides and dtypes, so an operator's `describe` needs no
numbers: it takes the operator's arguments by name, with tensors that may be on the device `meta`, and returns a `Call`. Whoever
executes it copies `words`, puts an address into each word of `addresses`, `threads` and `parallel` into theirs, and calls `function`.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.cpp import Library, compiler, team

ALIGNMENT = 64
"""Bytes: scratch begins at multiples of them."""
MOST_CALLS = 256
"""Layouts that an operator keeps calls for."""


class UnsupportedCall(Exception):
    """Layouts or settings that there is no function in C++ for; PyTorch computes in its place."""


class Layout(NamedTuple):
    """What a call takes a tensor for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Made(NamedTuple):
    """A dense tensor that a call writes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Operand(NamedTuple):
    """What a field has the address of: an `argument` (key: its name), an `output` or `scratch` (key: its number), the structure `itself`
    (key: 0), or the place `offset` bytes further on."""

    kind: str
    key: Any
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Call:
    """words: the structure, with 0 for addresses. addresses: (word, what it has the address of). threads, parallel: words of these.

    arguments: by name, tensors of the operator that are read or written, those of a list as `name.0` and so on; written: those that are
    written. outputs: in the order in which the operator returns them. scratch: bytes of each buffer, whose contents mean nothing before
    and after.
    """

    library: Library
    function: str
    words: bytes
    addresses: tuple[tuple[int, Operand], ...]
    threads: int
    parallel: int
    arguments: dict[str, Layout]
    outputs: tuple[Made, ...]
    scratch: tuple[int, ...]
    written: tuple[str, ...]


def layout_of(x: Tensor) -> Layout:
    return Layout(x.dtype, tuple(x.shape), x.stride())


def demand(name: str, x: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int], *, dense: bool = False) -> Tensor:
    """x, of one of these dtypes and of this shape; its last numbers lie one after the other, or all of them. Raises `UnsupportedCall`."""
    adjacent = x.is_contiguous() if dense else x.shape[-1:].numel() < 2 or x.stride(-1) == 1
    if x.dtype not in dtypes or x.shape != torch.Size(shape) or not adjacent:
        raise UnsupportedCall(f"{name} {layout_of(x)}; expected {' or '.join(map(str, dtypes))} {tuple(shape)}")
    return x


def strides_of(field: str, x: Tensor | None, count: int, *, numbers: bool = False) -> dict[str, int]:
    """The array `field` of a structure: the first `count` strides of x, in bytes or in numbers; 0 along a size of 1."""
    if x is None:
        return {}
    unit = 1 if numbers else x.dtype.itemsize
    steps = [0 if size == 1 else step * unit for size, step in zip(x.shape, x.stride())]
    return {f"{field}.{place}": step for place, step in enumerate(steps[:count])}


def call(
    library: Library,
    function: str,
    structure: type[ctypes.Structure],
    fields: Mapping[str, Operand | float | None],
    tensors: Mapping[str, Tensor | None],
    *,
    outputs: Sequence[Made] = (),
    scratch: Sequence[int] = (),
    written: Sequence[str] = (),
) -> Call:
    """A call of `function` with a `structure`, of which the fields that are not named are 0.

    fields: by path (`count`; `blocks.3.k`, where a field is an array of structures): numbers, or what it has the address of; None: 0.
    tensors: the operator's, by name, of which only layouts are looked at; None: absent.
    """
    words, addresses = bytearray(ctypes.sizeof(structure)), []
    for path, value in fields.items():
        at, kind = _place(structure, path)
        if isinstance(value, Operand):
            addresses.append((at // 8, value))
        elif value is not None:
            struct.pack_into("d" if kind is ctypes.c_double else "q", words, at, value)
    threads, parallel = (_place(structure, name)[0] // 8 for name in ("threads", "parallel"))
    return Call(
        library,
        function,
        bytes(words),
        tuple(addresses),
        threads,
        parallel,
        {name: layout_of(x) for name, x in tensors.items() if x is not None},
        tuple(outputs),
        tuple(scratch),
        tuple(written),
    )


def _place(structure: Any, path: str) -> tuple[int, Any]:
    """Byte and type of a field."""
    at, kind = 0, structure
    for part in path.split("."):
        if part.isdigit():
            kind = kind._type_
            at += int(part) * ctypes.sizeof(kind)
        else:
            at += getattr(kind, part).offset
            kind = next(own for name, own in kind._fields_ if name == part)
    return at, kind


def scratch_places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of that many bytes begin within one, and the bytes of it."""
    places, total = [], 0
    for size in sizes:
        places.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return places, total


def run(call: Call, tensors: Mapping[str, Tensor | None]) -> list[Tensor]:
    """Make the call with these arguments; what it returns. Raises `InputError` where they are others than those that it was described for,
    `BuildError` where there is no object."""
    for name, layout in call.arguments.items():
        x = tensors.get(name)
        if x is None or not x.is_cpu or layout_of(x) != layout:
            given = None if x is None else f"{layout_of(x)} on {x.device}"
            raise InputError(f"{call.function} was given {name} {given}; expected {layout} on cpu")
    return _run(call, tensors)


def _run(call: Call, tensors: Mapping[str, Tensor | None]) -> list[Tensor]:
    outputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in call.outputs]
    places, size = scratch_places(call.scratch)
    scratch = torch.empty(size, dtype=torch.uint8, device="cpu") if size else None
    words = array("q", call.words)
    for word, (kind, key, offset) in call.addresses:
        if kind == "argument":
            words[word] = tensors[key].data_ptr() + offset
        elif kind == "output":
            words[word] = outputs[key].data_ptr() + offset
        elif kind == "itself":
            words[word] = words.buffer_info()[0] + offset
        else:
            words[word] = scratch.data_ptr() + places[key] + offset if size else 0
    words[call.threads], words[call.parallel] = torch.get_num_threads(), team() or 0
    call.library.function(call.function)(ctypes.c_void_p(words.buffer_info()[0]))
    return outputs


class Operator:
    """An operator's implementation on a CPU: the call that `describe` makes of its arguments, where it makes one, else the `reference`."""

    def __init__(
        self,
        reference: Callable[..., Any],
        describe: Callable[..., Call],
        settings: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """settings: what `describe` is told besides of the arguments."""
        self.reference, self.describe, self.settings = reference, describe, settings
        self._defaults = {name: x.default for name, x in signature(reference).parameters.items()}
        self._calls: dict[tuple[Any, ...], Call | None] = {}

    def __call__(self, *given: Any, **named: Any) -> Any:
        arguments = {**self._defaults, **dict(zip(self._defaults, given)), **named}
        call = self.call(arguments)
        if call is None:
            return self.reference(**arguments)
        outputs = _run(call, flat(arguments))
        return None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)

    def call(self, arguments: Mapping[str, Any]) -> Call | None:
        """The call for these arguments; None: PyTorch computes. Waits for the compiler when it is first asked for a layout."""
        settings = {} if self.settings is None else self.settings(arguments)
        key = (*settings.values(), *map(_key, arguments.values()))
        if key not in self._calls:
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[key] = self._made({**arguments, **settings})
        return self._calls[key]

    def _made(self, arguments: dict[str, Any]) -> Call | None:
        if compiler() is None or any(isinstance(x, Tensor) and not x.is_cpu for x in flat(arguments).values()):
            return None
        try:
            made = self.describe(**arguments)
        except UnsupportedCall:
            return None
        return made if made.library.failure() is None else None


OPERATORS: dict[Any, Operator] = {}
"""By what stands in a graph for them (`torch.ops.semkv.scores.default`): operators that a list of calls can have. Each puts itself in."""


def flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with those of a list as `name.0` and so on."""
    made = dict(arguments)
    for name, x in arguments.items():
        if isinstance(x, (list, tuple)):
            del made[name]
            made |= {f"{name}.{n}": part for n, part in enumerate(x)}
    return made


def _key(x: Any) -> Any:
    if type(x) is Tensor or (x is not None and isinstance(x, Tensor)):
        return x.dtype, x.shape, x.stride(), x.is_cpu
    return tuple(map(_key, x)) if isinstance(x, (list, tuple)) else x


__all__ = [
    "OPERATORS",
    "Call",
    "Layout",
    "Made",
    "Operand",
    "Operator",
    "UnsupportedCall",
    "call",
    "demand",
    "flat",
    "layout_of",
    "run",
    "scratch_places",
    "strides_of",
]
