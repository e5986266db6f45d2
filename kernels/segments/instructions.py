"""A run of nodes of a graph as instructions of the template: which there are, and what stands for each operator of ATen.

Sizes are those of one call, so everything is decided once for a number of rows. Tensors without numbers (device `meta`) go through the
views of the graph, which costs a step nothing: an instruction reads and writes through strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from semkv.ir.ops import linear

aten = torch.ops.aten
RANK = 4
MAX_TOKENS = 8
"""Vectors that a weight is multiplied with, at most: with more it is a matter of arithmetic, which PyTorch is good at."""

CODES = (
    "COPY",
    "CONVERT",
    "ADD",
    "MULTIPLY",
    "DIVIDE",
    "NEGATE",
    "SQUARE",
    "CUBE",
    "SQUARE_ROOT",
    "RECIPROCAL_ROOT",
    "RELU",
    "SINE",
    "COSINE",
    "TANH",
    "SIGMOID",
    "SILU",
    "GELU",
    "GELU_TANH",
    "REDUCE",
    "NORMALISE",
    "GATHER",
    "PRODUCT",
)
"""What the template computes."""

UNARY = {
    aten.neg.default: "NEGATE",
    aten.rsqrt.default: "RECIPROCAL_ROOT",
    aten.sqrt.default: "SQUARE_ROOT",
    aten.relu.default: "RELU",
    aten.sin.default: "SINE",
    aten.cos.default: "COSINE",
    aten.tanh.default: "TANH",
    aten.sigmoid.default: "SIGMOID",
    aten.silu.default: "SILU",
}
POWERS = {2: "SQUARE", 3: "CUBE", 0.5: "SQUARE_ROOT", -0.5: "RECIPROCAL_ROOT"}
BINARY = {
    aten.add.Tensor: ("ADD", 1),
    aten.sub.Tensor: ("ADD", -1),
    aten.mul.Tensor: ("MULTIPLY", 1),
    aten.div.Tensor: ("DIVIDE", 1),
}
LINEAR = (linear, aten.linear.default)
KNOWN = frozenset(
    (
        *UNARY,
        *BINARY,
        *LINEAR,
        aten.gelu.default,
        aten.pow.Tensor_Scalar,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.clone.default,
        aten.layer_norm.default,
        aten.embedding.default,
        aten.cat.default,
        aten.stack.default,
        aten.sym_size.int,
    )
)
"""Operators that `emit` knows by name; the others that it takes are views."""


class UnsupportedNode(Exception):
    """A node that there is no instruction for, with these sizes or dtypes."""


class Base(NamedTuple):
    """Memory that a value lies in. kind: `input`, `weight`, `output`, `scratch` or `constant`; number among those of its kind."""

    kind: str
    number: int


@dataclass(frozen=True)
class Value:
    """A tensor of the segment: where it lies, and its layout as a tensor without numbers (sizes, strides, offset)."""

    base: Base
    layout: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.layout.shape


class Operand(NamedTuple):
    """`Operand` of the template, before bases have addresses; strides [RANK]."""

    base: Base | None
    offset: int = 0
    strides: tuple[int, ...] = (0,) * RANK


ABSENT = Operand(None)


@dataclass(frozen=True)
class Instruction:
    """`Instruction` of the template; operands: `a`, `b`, `c`, as many as it has."""

    code: str
    sizes: tuple[int, ...]
    out: Operand
    operands: tuple[Operand, ...]
    value: float = 1.0


@dataclass
class Instructions:
    """What a segment computes for inputs of given sizes.

    steps: in order. scratch: numbers of each buffer that holds a value in between. constants: numbers that operands read. outputs: the
    sizes of what it returns. weights: parameters and buffers in the order of their bases.
    """

    steps: list[Instruction] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    outputs: list[torch.Size] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    # -- values --------------------------------------------------------------------------------------------------------

    def fresh(self, shape: Sequence[int]) -> Value:
        """A dense value in a buffer of its own."""
        layout = torch.empty(tuple(shape), dtype=torch.float32, device="meta")
        self.scratch.append(layout.numel())
        return Value(Base("scratch", len(self.scratch) - 1), layout)

    def constant(self, number: float) -> Value:
        """One number, which broadcasts."""
        if number not in self.constants:
            self.constants.append(number)
        layout = torch.empty((), dtype=torch.float32, device="meta")
        return Value(Base("constant", self.constants.index(number)), layout)

    def dense(self, x: Value) -> Value:
        """float32 x, or a copy of it where its numbers do not lie one after the other."""
        floats(x)
        if x.layout.is_contiguous():
            return x
        out = self.fresh(x.shape)
        self.copy(x, out)
        return out

    def copy(self, x: Value, out: Value) -> None:
        sizes, ours, theirs = common(out.shape, out.layout.stride(), x.layout.stride())
        self.steps.append(Instruction("COPY", sizes, placed(out, ours), (placed(x, theirs),)))

    # -- instructions --------------------------------------------------------------------------------------------------

    def elementwise(self, code: str, operands: Sequence[Value], value: float = 1.0) -> Value:
        """One output number for each number of the operands, broadcast together."""
        floats(*operands)
        out = self.fresh(torch.broadcast_shapes(*(x.shape for x in operands)))
        strides = [x.layout.expand(out.shape).stride() for x in operands]
        sizes, ours, *theirs = common(out.shape, out.layout.stride(), *strides)
        places = tuple(placed(x, own) for x, own in zip(operands, theirs))
        self.steps.append(Instruction(code, sizes, placed(out, ours), places, value))
        return out

    def convert(self, x: Value) -> Value:
        """int64 numbers as float32."""
        out = self.fresh(x.shape)
        sizes, ours, theirs = common(out.shape, out.layout.stride(), x.layout.stride())
        self.steps.append(Instruction("CONVERT", sizes, placed(out, ours), (placed(x, theirs),)))
        return out

    def reduce(self, x: Value, *, mean: bool, keep: bool) -> Value:
        """Sums, or means, over the last dim."""
        x, size = self.dense(x), x.shape[-1]
        out, rows = self.fresh((*x.shape[:-1], 1)), x.layout.numel() // max(1, size)
        read, written = placed(x, (0, 0, size, 1)), Operand(out.base, 0, (0, 0, 1, 0))
        self.steps.append(Instruction("REDUCE", (1, 1, rows, size), written, (read,), 1 / size if mean else 1.0))
        return out if keep else Value(out.base, out.layout.squeeze(-1))

    def normalise(self, x: Value, weight: Value | None, bias: Value | None, epsilon: float) -> Value:
        """Layer normalisation over the last dim."""
        x, size = self.dense(x), x.shape[-1]
        out, rows = self.fresh(x.shape), x.layout.numel() // max(1, size)
        terms = tuple(ABSENT if y is None else placed(self.dense(y), (0, 0, 0, 1)) for y in (weight, bias))
        read, written = (placed(y, (0, 0, size, 1)) for y in (x, out))
        self.steps.append(Instruction("NORMALISE", (1, 1, rows, size), written, (read, *terms), epsilon))
        return out

    def product(self, x: Value, weight: Value, bias: Value | None) -> Value:
        """x [..., K] times weight [N, K], plus bias [N]."""
        expect(weight.layout.is_contiguous(), "a weight with gaps")
        x, (outer, inner) = self.dense(x), weight.shape
        tokens = x.layout.numel() // max(1, inner)
        expect(tokens <= MAX_TOKENS, f"{tokens} tokens")
        out = self.fresh((*x.shape[:-1], outer))
        operands = tuple(ABSENT if y is None else placed(self.dense(y)) for y in (x, weight, bias))
        self.steps.append(Instruction("PRODUCT", (tokens, inner, outer, 0), placed(out), operands))
        return out

    def gather(self, table: Value, index: Value) -> Value:
        """Rows of table [N, W] at index int64."""
        whole = table.layout.is_contiguous() and index.layout.is_contiguous()
        expect(whole and index.layout.dtype == torch.int64, "an embedding with gaps")
        floats(table)
        count, width = table.shape
        out = self.fresh((*index.shape, width))
        operands = (placed(index, (0, 0, 1, 0)), placed(table))
        sizes = (1, 1, index.layout.numel(), width)
        self.steps.append(Instruction("GATHER", sizes, placed(out, (0, 0, width, 1)), operands, float(count)))
        return out

    def joined(self, parts: Sequence[Value], dim: int) -> Value:
        """The parts one after the other along `dim`."""
        floats(*parts)
        out = self.fresh(torch.cat([x.layout for x in parts], dim).shape)
        start = 0
        for x in parts:
            self.copy(x, Value(out.base, out.layout.narrow(dim, start, x.shape[dim])))
            start += x.shape[dim]
        return out


def placed(x: Value, strides: Sequence[int] = (0,) * RANK) -> Operand:
    """x as an operand that goes through it with these strides; none: where it begins is enough."""
    offset = x.base.number if x.base.kind == "constant" else int(x.layout.storage_offset())
    return Operand(Base("constant", 0) if x.base.kind == "constant" else x.base, offset, tuple(strides))


def floats(*values: Value) -> None:
    """Refuse what is not float32."""
    for x in values:
        expect(x.layout.dtype == torch.float32, f"numbers of {x.layout.dtype}")


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnsupportedNode(otherwise)


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


def emit(node: Node, made: Instructions, values: Callable[[Any], Any]) -> Any:
    """Append what `node` computes; returns its value, a number, or a list of such. values: what an argument stands for.

    Raises
    ------
    UnsupportedNode
    """
    target, arguments, keywords = node.target, values(node.args), values(node.kwargs)
    if target in UNARY:
        return made.elementwise(UNARY[target], arguments[:1])
    if target == aten.gelu.default:
        return made.elementwise("GELU_TANH" if keywords.get("approximate") == "tanh" else "GELU", arguments[:1])
    if target == aten.pow.Tensor_Scalar:
        expect(arguments[1] in POWERS, f"the power {arguments[1]}")
        return made.elementwise(POWERS[arguments[1]], arguments[:1])
    if target in BINARY:
        code, sign = BINARY[target]
        operands = [x if isinstance(x, Value) else made.constant(float(x)) for x in arguments[:2]]
        return made.elementwise(code, operands, sign * keywords.get("alpha", 1.0))
    if target in (aten.mean.dim, aten.sum.dim_IntList):
        x, dims, keep = (*arguments, False)[:3]
        expect(list(dims) in ([-1], [x.layout.dim() - 1]) and not keywords, f"a reduction over {dims}")
        return made.reduce(x, mean=target == aten.mean.dim, keep=keep)
    if target == aten.layer_norm.default:
        x, shape, weight, bias, epsilon = (*arguments, *(None, None, 1e-5)[len(arguments) - 2 :])[:5]
        expect(list(shape) == [x.shape[-1]], f"a normalisation over {shape}")
        return made.normalise(x, weight, bias, epsilon)
    if target in LINEAR:
        return made.product(*(*arguments, None)[:3])
    if target == aten.embedding.default:
        return made.gather(*arguments[:2])
    if target == aten.cat.default:
        parts, dim = (*arguments, 0)[:2]
        return made.joined(parts, dim % parts[0].layout.dim())
    if target == aten.stack.default:
        parts, dim = (*arguments, 0)[:2]
        dim %= parts[0].layout.dim() + 1
        return made.joined([Value(x.base, x.layout.unsqueeze(dim)) for x in parts], dim)
    if target == aten.sym_size.int:
        return arguments[0].shape[arguments[1]]
    if target == operator.getitem:
        return arguments[0][arguments[1]]
    if target == aten.to.dtype and arguments[0].layout.dtype == torch.int64 and arguments[1] == torch.float32:
        return made.convert(arguments[0])
    return _view(target, arguments, keywords, made)


def _view(target: Any, arguments: Any, keywords: Any, made: Instructions) -> Any:
    """A view, by what PyTorch makes of tensors without numbers; a copy where it makes one."""
    x = arguments[0]
    bare = torch.utils._pytree.tree_map(lambda y: y.layout if isinstance(y, Value) else y, (arguments, keywords))
    result = target(*bare[0], **bare[1])
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    own = x.layout.untyped_storage()._cdata
    if all(part.untyped_storage()._cdata == own for part in parts):
        views = [Value(x.base, part) for part in parts]
        return views if isinstance(result, (list, tuple)) else views[0]
    expect(len(parts) == 1 and parts[0].dtype == x.layout.dtype == torch.float32, f"{target} of {x.layout.dtype}")
    out = made.fresh(x.shape)
    made.copy(x, out)
    return Value(out.base, out.layout.view(parts[0].shape))


def is_supported(node: Node) -> bool:
    """Whether there may be instructions for a node, by its operator alone."""
    target = node.target
    if node.op != "call_function":
        return False
    if target in KNOWN:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    alias = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return alias is not None and not alias.is_write and not target._schema.is_mutable
