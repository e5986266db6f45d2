"""A run of nodes computed by one call of C++: bases get addresses, instructions go through `ctypes`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attribute
from semkv.kernels.cpp import Library, library, team
from semkv.kernels.segments.instructions import (
    ABSENT,
    CODES,
    RANK,
    Base,
    Instruction,
    Instructions,
    Operand,
    UnsupportedNode,
    Value,
    emit,
)
from semkv.kernels.segments.scratch import scratch_offsets

MOST_SIZES = 64
"""Of inputs that a segment keeps instructions for; a graph whose sizes change with every step is not one for it."""
OPERANDS = 3
"""Of an instruction, besides its output."""
TEMPLATE = Path(__file__).parent / "template.cpp"


class _Operand(ctypes.Structure):
    """`Operand` of the template."""

    _fields_ = (("base", ctypes.c_int64), ("offset", ctypes.c_int64), ("strides", ctypes.c_int64 * RANK))


class _Instruction(ctypes.Structure):
    """`Instruction` of the template."""

    _fields_ = (
        ("code", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * RANK),
        *((name, _Operand) for name in ("out", "a", "b", "c")),
        ("value", ctypes.c_double),
    )


class _Call(ctypes.Structure):
    """`Call` of the template."""

    _fields_ = (
        ("bases", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
    )


@cache
def segments_library() -> Library:
    """The object, one for all segments."""
    return library(TEMPLATE, {f"OP_{name}": number for number, name in enumerate(CODES)})


class Segment:
    """Nodes of a graph that are computed together: by one call where there are instructions for all of them, else one by one.

    module: the nodes as a graph of their own: placeholders are its inputs, `get_attr` its weights, and it returns a tuple. It is the
    reference, and answers calls that C++ does not: gradients, other dtypes or devices.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self._tapes: dict[tuple[Any, ...], Tape | None] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return self.module(*inputs)
        key = tuple([x.shape if isinstance(x, Tensor) else x for x in inputs])
        tape = self._tapes.get(key)
        if tape is None and key not in self._tapes and len(self._tapes) < MOST_SIZES:
            tape = self._tapes[key] = self._made(inputs)
        return tape.run(inputs) if tape is not None and tape.takes(inputs) else self.module(*inputs)

    def _made(self, inputs: Sequence[Any]) -> Tape | None:
        try:
            return Tape(self.module, inputs)
        except UnsupportedNode:
            return None


class Tape:
    """The instructions of a segment for inputs of given sizes. It is written once: steps share it."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any]) -> None:
        """Raises `UnsupportedNode`."""
        made = Instructions()
        returned = self._read(module, inputs, made)
        renamed = self._outputs(returned, made)
        self._inputs = [(place, x.dtype) for place, x in enumerate(inputs) if isinstance(x, Tensor)]
        self._weights = made.weights
        self._kinds = [(x.dtype, x.shape, x.stride(), "cpu") for x in made.weights]
        self._shapes = made.outputs
        self._constants = torch.tensor(made.constants or [0.0], dtype=torch.float32, device="cpu")
        offsets, self._scratch = scratch_offsets(made, renamed)
        first = {"input": 0, "weight": len(self._inputs)}
        first["output"] = first["weight"] + len(self._weights)
        first["scratch"] = first["output"] + len(self._shapes)
        first["constant"] = first["scratch"] + 1

        def operand(x: Operand) -> _Operand:
            if x.base is None:
                return _Operand(-1)
            base = renamed.get(x.base, x.base)
            inside = base.kind == "scratch"
            index, offset = (0, offsets[base.number] + x.offset) if inside else (base.number, x.offset)
            return _Operand(first[base.kind] + index, offset, x.strides)

        def operands(step: Instruction) -> list[_Operand]:
            given = (step.out, *step.operands)
            return [operand(x) for x in (*given, *[ABSENT] * (OPERANDS + 1 - len(given)))]

        self._steps = (_Instruction * len(made.steps))(
            *(_Instruction(CODES.index(step.code), step.sizes, *operands(step), step.value) for step in made.steps)
        )
        self._verified: list[int] = []
        """Addresses of the weights when they were last looked at: one of another dtype or size has another."""

    def _read(self, module: GraphModule, inputs: Sequence[Any], made: Instructions) -> Sequence[Any]:
        """Append all nodes to `made`; what the module returns."""
        values: dict[Node, Any] = {}
        waiting, tensors = list(inputs), 0

        def of(argument: Any) -> Any:
            return torch.fx.map_arg(argument, values.__getitem__)

        for node in module.graph.nodes:
            if node.op == "placeholder":
                x = waiting.pop(0)
                values[node] = x
                if isinstance(x, Tensor):
                    layout = torch.empty(x.shape, dtype=x.dtype, device="meta")
                    values[node], tensors = Value(Base("input", tensors), layout), tensors + 1
            elif node.op == "get_attr":
                weight = attribute(module, str(node.target))
                assert isinstance(weight, Tensor)
                layout = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
                values[node] = Value(Base("weight", len(made.weights)), layout)
                made.weights.append(weight)
            elif node.op == "output":
                return of(node.args[0])
            else:
                values[node] = emit(node, made, of)
        raise AssertionError("a graph without an output")

    def _outputs(self, returned: Sequence[Any], made: Instructions) -> dict[Base, Base]:
        """Give each returned value its place: its buffer where it has one to itself, else a copy. Returns the buffers that are outputs."""
        renamed: dict[Base, Base] = {}
        self._returned = []
        for x in returned:
            if not isinstance(x, Value):
                self._returned.append(x)
                continue
            out = Base("output", len(made.outputs))
            self._returned.append(out)
            whole = x.base.kind == "scratch" and x.layout.numel() == made.scratch[x.base.number]
            if whole and x.layout.is_contiguous() and x.base not in renamed:
                renamed[x.base] = out
            else:
                if x.layout.dtype != torch.float32:
                    raise UnsupportedNode(f"an output of {x.layout.dtype}")
                made.copy(x, Value(out, torch.empty(x.shape, dtype=torch.float32, device="meta")))
            made.outputs.append(x.shape)
        return renamed

    def takes(self, inputs: Sequence[Any]) -> bool:
        """Whether inputs and weights are on a CPU, and of the dtypes, sizes and strides that the instructions are for."""
        if any(inputs[place].dtype != dtype or not inputs[place].is_cpu for place, dtype in self._inputs):
            return False
        addresses = [x.data_ptr() for x in self._weights]
        if addresses != self._verified:
            kinds = [(x.dtype, x.shape, x.stride(), x.device.type) for x in self._weights]
            if kinds != self._kinds:
                return False
            self._verified = addresses
        return True

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """What the module returns; only for inputs that it `takes`."""
        given = [inputs[place].contiguous() for place, _ in self._inputs]
        outputs = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in self._shapes]
        scratch = torch.empty(self._scratch, dtype=torch.float32, device="cpu")
        addresses = [x.data_ptr() for x in (*given, *self._weights, *outputs, scratch, self._constants)]
        table = array("q", addresses)
        call = _Call(table.buffer_info()[0], len(self._steps), torch.get_num_threads(), team())
        if segments_library().function("segment")(ctypes.byref(call), self._steps):
            raise IndexError("an index lies outside of the embedding")
        return tuple(outputs[x.number] if isinstance(x, Base) else x for x in self._returned)
