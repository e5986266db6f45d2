"""What stands for each operator of ATen, and for those of semkv: an entry of a table, or a few lines.

Sizes are those of one call, so everything is decided once for them. Tensors without numbers (device `meta`) go through the operator itself
for sizes, dtypes and views, which costs a step nothing: an instruction reads and writes through strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from semkv.ir import ops
from semkv.ir.ops import linear
from semkv.kernels.calls import OPERATORS
from semkv.kernels.mixed_attention import mixed_attention
from semkv.kernels.segments.emitting import Emitting, Given, described
from semkv.kernels.segments.values import Emitted, UnsupportedNode, Value, common, expect

aten = torch.ops.aten
FLOAT = torch.float32
NONE = float("-inf")


def _overloads(name: str, kinds: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, kind) for kind in kinds.split() if kind in packet.overloads()]


ELEMENTWISE: dict[Any, tuple[str, int]] = {
    overload: (code, arity)
    for arity, kinds, table in (
        (
            1,
            "default",
            "neg NEGATE abs SIZE sign SIGN sqrt SQUARE_ROOT rsqrt RECIPROCAL_ROOT reciprocal RECIPROCAL square SQUARE floor FLOOR "
            "ceil CEILING round ROUND relu RELU sin SINE cos COSINE log LOGARITHM erf ERROR exp EXPONENTIAL tanh TANH "
            "sigmoid SIGMOID silu SILU logical_not NOT",
        ),
        (
            2,
            "default Tensor Scalar",
            "mul MULTIPLY true_divide DIVIDE floor_divide DIVIDE_DOWN remainder REMAINDER minimum LEAST maximum MOST eq EQUAL "
            "ne UNEQUAL lt BELOW le UP_TO gt ABOVE ge FROM logical_and BOTH logical_or EITHER logical_xor ONE_OF "
            "bitwise_left_shift SHIFT_LEFT bitwise_right_shift SHIFT_RIGHT __lshift__ SHIFT_LEFT __rshift__ SHIFT_RIGHT",
        ),
        (2, "Tensor Scalar", "div DIVIDE bitwise_and BITS_AND bitwise_or BITS_OR bitwise_xor BITS_XOR"),
        (2, "Tensor_Tensor Scalar", "pow POWER"),
        (3, "self ScalarSelf ScalarOther Scalar", "where WHERE"),
    )
    for name, code in zip(table.split()[::2], table.split()[1::2])
    for overload in _overloads(name, kinds)
}
"""Instruction and number of operands, which are the operator's first arguments."""
POWERS = {1: "COPY", 2: "SQUARE", 3: "CUBE", 0.5: "SQUARE_ROOT", -0.5: "RECIPROCAL_ROOT", -1: "RECIPROCAL"}
REDUCTIONS = {
    "sum": ("SUM", "default dim_IntList"),
    "mean": ("SUM", "default dim"),
    "amax": ("LARGEST", "default"),
    "amin": ("SMALLEST", "default"),
    "max": ("LARGEST", "default"),
    "min": ("SMALLEST", "default"),
    "any": ("ANY", "default dim dims"),
    "all": ("ALL", "default dim dims"),
    "logsumexp": ("LOG_SUM", "default"),
}
"""Instruction, and overloads."""
STAND_FOR = {mixed_attention: ops.mixed_attention}
"""Operators that functions in a graph stand for."""
SCATTERS = {"sum": "SCATTER_ADD", "amax": "SCATTER_MOST", "amin": "SCATTER_LEAST"}
FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
EMPTY = ("empty", "empty_like", "new_empty")
"""Makers whose numbers are written later."""


class Operation:
    """One call of an operator: `args` and `kwargs` with values in place of tensors.

    into: what it writes to in place. Its functional form is `target` then.
    """

    def __init__(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], into: Value | None = None) -> None:
        self.target, self.args, self.kwargs, self.into = target, args, kwargs, into
        self.emitting = Emitting()
        names = [x.name for x in target._schema.arguments]
        self.given = {
            **{x.name: x.default_value for x in target._schema.arguments if x.has_default_value()},
            **dict(zip(names, args)),
            **kwargs,
        }

    def bare(self) -> Any:
        """What the operator makes of tensors without numbers."""
        kwargs = {name: _bare(x) for name, x in self.kwargs.items()}
        if "device" in kwargs:
            expect(torch.device(kwargs["device"] or "cpu").type == "cpu", f"a tensor on {kwargs['device']}")
        if "device" in self.given:
            kwargs["device"] = "meta"
        return self.target(*(_bare(x) for x in self.args), **kwargs)

    def out(self) -> Value:
        """Where its one tensor goes: a new one, or what it writes to."""
        made = self.bare()
        return self.emitting.new(made.shape, made.dtype) if self.into is None else self.into

    def base(self, x: Value) -> Value:
        """What it changes a part of: a copy of x, or what it writes to."""
        return self.emitting.copied(x) if self.into is None else self.into


Emit = Callable[[Operation], Any]
FUNCTIONS: dict[Any, Emit] = {}


def emits(*targets: Any) -> Callable[[Emit], Emit]:
    """The function emits these operators; returns their value."""

    def known(function: Emit) -> Emit:
        FUNCTIONS.update(dict.fromkeys(targets, function))
        return function

    return known


def emit(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Emitted:
    """What a call becomes; `args` and `kwargs` with values in place of tensors. Raises `UnsupportedNode`."""
    target = STAND_FOR.get(target, target)
    if target in OPERATORS:
        operation = Operation(target, args, kwargs)
        made = described(operation.emitting, OPERATORS[target], operation.given)
        return _emitted(made, operation)
    expect(isinstance(target, torch._ops.OpOverload) and target.namespace == "aten", f"no instruction for {target}")
    into, functional = None, target
    if target._schema.is_mutable:
        functional, into = _functional(target), args[0]
    operation = Operation(functional, args, kwargs, into)
    made = FUNCTIONS.get(functional, _view)(operation)
    if into is not None and made is not into:
        operation.emitting.copy(made, into)
        made = into
    return _emitted(made, operation)


def _emitted(made: Any, operation: Operation) -> Emitted:
    return Emitted(made, tuple(operation.emitting.fresh), tuple(operation.emitting.steps))


def _functional(target: Any) -> Any:
    """The operator that computes what `target` writes in place to its first argument."""
    name = target._schema.name.split("::")[1]
    written = [x.name for x in target._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    expect(name.endswith("_") and written == ["self"], f"no instruction for {target}")
    found = getattr(getattr(aten, name[:-1], None), target._overloadname, None)
    expect(found is not None, f"no instruction for {target}")
    return found


# -- elementwise -------------------------------------------------------------------------------------------------------


@emits(*ELEMENTWISE)
def _elementwise(x: Operation) -> Value:
    code, arity = ELEMENTWISE[x.target]
    return x.emitting.apply(code, x.args[:arity], x.out())


@emits(*_overloads("add", "Tensor Scalar"), *_overloads("sub", "Tensor Scalar"), *_overloads("rsub", "Tensor Scalar"))
def _sum_of_two(x: Operation) -> Value:
    one, other = (x.given["self"], x.given["other"])
    name, alpha = x.target._schema.name, x.given.get("alpha", 1)
    if name.endswith("rsub"):
        one, other = other, one
    expect(isinstance(alpha, int) or any(_floating(y) for y in (one, other)), f"whole numbers times {alpha}")
    return x.emitting.apply("ADD", [one, other], x.out(), alpha if name.endswith("::add") else -alpha)


@emits(*_overloads("div", "Tensor_mode Scalar_mode"))
def _divided(x: Operation) -> Value:
    code = {"floor": "DIVIDE_DOWN", "trunc": "DIVIDE_CUT", None: "DIVIDE"}[x.given["rounding_mode"]]
    return x.emitting.apply(code, x.args[:2], x.out())


@emits(aten.pow.Tensor_Scalar)
def _power(x: Operation) -> Value:
    one, exponent = x.args
    if exponent in POWERS:
        return x.emitting.apply(POWERS[exponent], [one], x.out())
    expect(one.dtype.is_floating_point, f"whole numbers to the power of {exponent}")
    return x.emitting.apply("POWER", [one, float(exponent)], x.out())


@emits(aten.gelu.default)
def _gelu(x: Operation) -> Value:
    return x.emitting.apply("GELU_TANH" if x.given["approximate"] == "tanh" else "GELU", x.args[:1], x.out())


@emits(aten.bitwise_not.default)
def _inverse(x: Operation) -> Value:
    return x.emitting.apply("NOT" if x.args[0].dtype == torch.bool else "BITS_NOT", x.args, x.out())


@emits(*_overloads("clamp", "default Tensor"), *_overloads("clamp_min", "default"), *_overloads("clamp_max", "default"))
def _clamped(x: Operation) -> Value:
    made, out = x.given["self"], x.out()
    for code, bound in (("MOST", x.given.get("min")), ("LEAST", x.given.get("max"))):
        if bound is not None:
            made = x.emitting.apply(code, [made, bound], out)
    return made


@emits(*_overloads("masked_fill", "Scalar Tensor"))
def _masked(x: Operation) -> Value:
    numbers, mask, value = x.args
    return x.emitting.apply("WHERE", [mask, value, numbers], x.out())


@emits(
    *_overloads("to", "dtype dtype_layout device other"),
    *_overloads("_to_copy", "default"),
    *_overloads("clone", "default"),
)
def _converted(x: Operation) -> Value:
    one, made = x.args[0], x.bare()
    if made.dtype == one.dtype and x.target._schema.name == "aten::to" and not x.given.get("copy"):
        return one
    return x.emitting.copied(one, made.dtype)


@emits(aten.contiguous.default)
def _contiguous(x: Operation) -> Value:
    return x.emitting.dense(x.args[0])


@emits(aten.copy.default)
def _copy(x: Operation) -> Value:
    out = x.out()
    x.emitting.copy(x.args[1], out)
    return out


# -- tensors that are made ---------------------------------------------------------------------------------------------


@emits(*(overload for name in FILLED for overload in _overloads(name, "default")))
def _constant(x: Operation) -> Value:
    out = x.out()
    x.emitting.copy(FILLED[x.target._schema.name.split("::")[1]], out)
    return out


@emits(
    *(overload for name in ("full", "full_like", "new_full") for overload in _overloads(name, "default")),
    *_overloads("fill", "Scalar Tensor"),
    aten.scalar_tensor.default,
)
def _full(x: Operation) -> Value:
    out, given = x.out(), x.given
    x.emitting.copy(next(given[name] for name in ("fill_value", "value", "s") if name in given), out)
    return out


@emits(*(overload for name in EMPTY for overload in _overloads(name, "default memory_format")))
def _empty(x: Operation) -> Value:
    return x.out()


@emits(*_overloads("arange", "default start start_step"))
def _arange(x: Operation) -> Value:
    out, start, step = x.out(), x.given.get("start", 0), x.given.get("step", 1)
    whole = not out.dtype.is_floating_point
    expect(not whole or (isinstance(start, int) and isinstance(step, int)), "whole numbers in other steps")
    settings: dict[str, Any] = (
        {"first": start, "second": step} if whole else {"value": float(start), "second": float(step)}
    )
    x.emitting.step("COUNT", (1, 1, 1, out.layout.numel), (out, (0, 0, 0, 1)), whole=whole, **settings)
    return out


# -- reductions --------------------------------------------------------------------------------------------------------


@emits(*(overload for name, (_, kinds) in REDUCTIONS.items() for overload in _overloads(name, kinds)))
def _reduced(x: Operation) -> Value:
    one, dims, made = x.args[0], x.given.get("dim"), x.bare()
    name = x.target._schema.name.split("::")[1]
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(one.shape)))
    size = 1
    for dim in dims:
        size *= one.shape[dim]
    value = 1 / max(1, size) if name == "mean" else 1.0
    expect(
        made.dtype.is_floating_point == one.dtype.is_floating_point or not one.dtype.is_floating_point,
        f"{name} as {made.dtype}",
    )
    return x.emitting.reduce(REDUCTIONS[name][0], one, dims, x.given.get("keepdim", False), made.dtype, value)


@emits(aten.cumsum.default)
def _summed_up(x: Operation) -> Value:
    one, out, dim = x.args[0], x.out(), x.args[1]
    if one.shape:
        moved = [x.emitting.view(y, y.meta.movedim(dim, -1)) for y in (one, out)]
        _along_last(x.emitting, "SUM_UP", moved[0], moved[1])
        return out
    x.emitting.copy(one, out)
    return out


def _along_last(emitting: Emitting, code: str, x: Value, out: Value, **settings: Any) -> None:
    """An instruction over the last dim of x, with an output of the same shape."""
    sizes, ours, theirs = common(x.shape[:-1], out.layout.strides[:-1], x.layout.strides[:-1])
    expect(sizes[0] == 1, "dims that cannot be joined")
    whole = not any(y.dtype.is_floating_point for y in (x, out))
    last = (x.shape[-1], out.layout.strides[-1], x.layout.strides[-1])
    sizes, ours, theirs = ((*own[1:], end) for own, end in zip((sizes, ours, theirs), last))
    emitting.step(code, sizes, (out, ours), (x, theirs), whole=whole, **settings)


@emits(aten.softmax.int, aten._softmax.default)
def _softmax(x: Operation) -> Value:
    e, (one, dim), out = x.emitting, x.args[:2], x.out()
    expect(one.dtype == out.dtype == FLOAT, f"a softmax of {one.dtype}")
    less = e.apply("ADD", [one, e.reduce("LARGEST", one, [dim], True, FLOAT)], e.new(one.shape), -1.0)
    powers = e.apply("EXPONENTIAL", [less], less)
    return e.apply("DIVIDE", [powers, e.reduce("SUM", powers, [dim], True, FLOAT)], out)


# -- normalisation -----------------------------------------------------------------------------------------------------


@emits(aten.layer_norm.default, aten.native_layer_norm.default)
def _layer_norm(x: Operation) -> Any:
    one, shape, weight, bias, epsilon = (
        x.given[name] for name in ("input", "normalized_shape", "weight", "bias", "eps")
    )
    expect(list(shape) == [one.shape[-1]], f"a normalisation over {shape}")
    given = [y for y in (one, weight, bias) if y is not None]
    expect(all(y.dtype == FLOAT for y in given), f"a normalisation of {one.dtype}")
    e = x.emitting
    one, size = e.dense(one), one.shape[-1]
    out, rows = e.new(one.shape), one.layout.numel // max(1, size)
    terms = [(None if y is None else e.dense(y), (0, 0, 0, 1)) for y in (weight, bias)]
    along = (0, 0, size, 1)
    e.step("NORMALISE", (1, 1, rows, size), (out, along), (one, along), *terms, value=epsilon)
    return out if x.target == aten.layer_norm.default else [out, None, None]


@emits(aten.rms_norm.default)
def _rms_norm(x: Operation) -> Value:
    e, one, out = x.emitting, x.given["input"], x.out()
    expect(
        one.dtype == FLOAT and list(x.given["normalized_shape"]) == [one.shape[-1]], "a normalisation over several dims"
    )
    square = e.apply("SQUARE", [one], e.new(one.shape))
    mean = e.reduce("SUM", square, [-1], True, FLOAT, 1 / one.shape[-1])
    epsilon = x.given["eps"] if x.given["eps"] is not None else torch.finfo(FLOAT).eps
    scale = e.apply("RECIPROCAL_ROOT", [e.apply("ADD", [mean, epsilon], mean)], mean)
    weight = x.given["weight"]
    made = e.apply("MULTIPLY", [one, scale], out)
    return made if weight is None else e.apply("MULTIPLY", [made, weight], out)


# -- products ----------------------------------------------------------------------------------------------------------


@emits(aten.linear.default)
def _linear(x: Operation) -> Value:
    return described(
        x.emitting, OPERATORS[linear], {"x": x.given["input"], "weight": x.given["weight"], "bias": x.given["bias"]}
    )


@emits(aten.bmm.default, aten.mm.default)
def _product(x: Operation) -> Value:
    return _matrix(x.emitting, *x.args[:2], x.out())


@emits(aten.matmul.default, aten.mv.default, aten.dot.default)
def _matmul(x: Operation) -> Value:
    e, (a, b), made = x.emitting, x.args[:2], x.bare()
    out = e.new(made.shape, made.dtype)
    a = e.view(a, a.meta[None]) if len(a.shape) == 1 else a
    b, dense = (e.view(b, b.meta[:, None]), 1) if len(b.shape) == 1 else (b, b.shape[-1])
    whole = e.view(out, out.meta.view(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], dense))
    _matrix(e, a, b, whole)
    return out


@emits(aten.addmm.default, aten.baddbmm.default)
def _product_and_sum(x: Operation) -> Value:
    expect(x.given["beta"] == 1 and x.given["alpha"] == 1, "a product with factors")
    return _matrix(x.emitting, *x.args[1:3], x.out(), x.args[0])


def _matrix(e: Emitting, a: Value, b: Value, out: Value, more: Value | None = None) -> Value:
    """a [.., m, k] times b [.., k, n], plus what is broadcast to [.., m, n], to `out`."""
    (m, inner), n, batch = a.shape[-2:], b.shape[-1], out.shape[:-2]
    given = [a, b, out] if more is None else [a, b, out, more]
    expect(all(x.dtype == FLOAT for x in given), f"a product of {a.dtype}")
    a, b = e.expanded(a, (*batch, m, inner)), e.expanded(b, (*batch, inner, n))
    terms = [out, a, b] if more is None else [out, a, b, e.expanded(more, (*batch, m, n))]
    try:
        sizes, *steps = common(batch, *(x.layout.strides[:-2] for x in terms))
        expect(sizes[:3] == (1, 1, 1), "several dims of products")
    except UnsupportedNode:
        return _matrix(e, *(e.copied(x) if x.layout.numel <= 1 << 16 else _too_large(x) for x in (a, b)), out, more)
    along = [
        (steps[0][3], out.layout.strides[-2], out.layout.strides[-1], 0),
        (steps[1][3], a.layout.strides[-2], 0, a.layout.strides[-1]),
        (steps[2][3], 0, b.layout.strides[-1], b.layout.strides[-2]),
    ]
    if more is not None:
        along.append((steps[3][3], *terms[3].layout.strides[-2:], 0))
    e.step("MATRIX", (sizes[3], m, n, inner), *zip(terms, along))
    return out


def _too_large(x: Value) -> Value:
    raise UnsupportedNode(f"a product of {x.shape} with gaps")


# -- indices -----------------------------------------------------------------------------------------------------------


@emits(aten.embedding.default)
def _embedding(x: Operation) -> Value:
    return _rows_at(x.emitting, *x.args[:2])


def _rows_at(e: Emitting, table: Value, index: Value) -> Value:
    """Rows of table [N, ...], dense, at an index of any shape."""
    index = e.dense(index)
    count, row = table.shape[0], table.layout.numel // max(1, table.shape[0]) * table.dtype.itemsize
    _expect_index(index)
    if not table.layout.dense:
        flat = e.view(index, index.meta.view(-1, *[1] * (len(table.shape) - 1)))
        made = _gathered(e, table, 0, e.expanded(flat, (index.layout.numel, *table.shape[1:])))
        return e.view(made, made.meta.view(*index.shape, *table.shape[1:]))
    out = e.new((*index.shape, *table.shape[1:]), table.dtype)
    sizes = (1, 1, index.layout.numel, row)
    e.step("TAKE", sizes, (out, (0, 0, row, 1)), (index, (0, 0, 1, 0)), (table, (0, 0, 0, 0)), first=count, second=row)
    return out


@emits(aten.index_select.default)
def _selected(x: Operation) -> Value:
    e, (one, dim, index) = x.emitting, x.args
    dim %= len(one.shape)
    shape = [1] * len(one.shape)
    shape[dim] = index.shape[0]
    return _gathered(e, one, dim, e.expanded(e.view(index, index.meta.view(shape)), x.bare().shape))


@emits(aten.index.Tensor)
def _indexed(x: Operation) -> Value:
    e, (one, indices) = x.emitting, x.args
    (dim,) = (
        [dim for dim, y in enumerate(indices) if y is not None] if sum(y is not None for y in indices) == 1 else (None,)
    )
    expect(dim is not None and indices[dim].dtype != torch.bool, "several indices, or a mask")
    index, shape = e.dense(indices[dim]), [1] * len(one.shape)
    shape[dim] = index.layout.numel
    wide = [*one.shape]
    wide[dim] = index.layout.numel
    made = _gathered(e, one, dim, e.expanded(e.view(index, index.meta.view(shape)), wide))
    return e.view(made, made.meta.view(x.bare().shape))


@emits(aten.gather.default)
def _gather(x: Operation) -> Value:
    one, dim, index = x.args[:3]
    return _gathered(x.emitting, one, dim % max(1, len(one.shape)), index)


def _gathered(e: Emitting, x: Value, dim: int, index: Value) -> Value:
    """Numbers of x at an index along `dim`, which has the shape of the output."""
    _expect_index(index)
    out = e.new(index.shape, x.dtype)
    sizes, ours, theirs, along = _around(out, x, dim, index)
    e.step("GATHER", sizes, (out, ours), (x, theirs), (index, along), first=x.shape[dim], second=x.layout.strides[dim])
    return out


@emits(
    *_overloads("scatter", "src value reduce value_reduce"),
    *_overloads("scatter_add", "default"),
    *_overloads("scatter_reduce", "two"),
)
def _scattered(x: Operation) -> Value:
    e, (one, dim, index) = x.emitting, x.args[:3]
    source = x.given.get("src", x.given.get("value"))
    _expect_index(index)
    expect("reduce" not in x.given or x.target == aten.scatter_reduce.two, "a scatter that multiplies")
    expect(x.given.get("include_self", True), "a scatter without what is there")
    name = {"aten::scatter": "SCATTER", "aten::scatter_add": "SCATTER_ADD"}.get(x.target._schema.name)
    code = name or SCATTERS.get(x.given.get("reduce", ""))
    expect(code is not None, f"a scatter that reduces by {x.given.get('reduce')}")
    out = x.base(one)
    dim %= max(1, len(one.shape))
    if isinstance(source, Value):
        source = e.view(source, source.meta[tuple(slice(0, size) for size in index.shape)])
    steps = source.layout.strides if isinstance(source, Value) else (0,) * len(index.shape)
    sizes, theirs, ours, along = _around(source, out, dim, index, steps)
    whole = not out.dtype.is_floating_point
    e.step(
        str(code),
        sizes,
        (out, ours),
        (source, theirs),
        (index, along),
        whole=whole,
        first=one.shape[dim],
        second=out.layout.strides[dim],
    )
    return out


def _around(
    dense: Given, x: Value, dim: int, index: Value, steps: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Sizes of an index; strides of what has its shape, of x but for `dim`, and of the index."""
    steps = dense.layout.strides if steps is None else steps
    others = [0 if place == dim else step for place, step in enumerate(x.layout.strides)]
    return common(index.shape, steps, others, index.layout.strides)


def _expect_index(index: Value) -> None:
    expect(index.dtype in (torch.int64, torch.int32), f"an index of {index.dtype}")


@emits(aten.searchsorted.Tensor)
def _searched(x: Operation) -> Value:
    e, row, asked, out = x.emitting, x.given["sorted_sequence"], x.given["self"], x.out()
    expect(x.given["sorter"] is None and row.layout.dense, "a search in what is not sorted, or has gaps")
    right = x.given["right"] or x.given["side"] == "right"
    count = row.shape[-1]
    steps = (
        torch.empty(row.shape[:-1], dtype=FLOAT, device="meta").stride()
        if len(row.shape) > 1
        else (0,) * (len(asked.shape) - 1)
    )
    along = [(*(step * count for step in steps), 0), asked.layout.strides]
    sizes, ours, theirs, own = common(asked.shape, out.layout.strides, *along)
    whole = not any(y.dtype.is_floating_point for y in (row, asked))
    e.step("SEARCH", sizes, (out, ours), (row, theirs), (asked, own), whole=whole, first=count, second=int(right))
    return out


# -- parts one behind the other ----------------------------------------------------------------------------------------


@emits(aten.cat.default)
def _joined(x: Operation) -> Value:
    parts, out = x.args[0], x.out()
    parts = [part for part in parts if part.shape != (0,)] if len(out.shape) > 1 else parts
    dim, start = x.given["dim"] % len(out.shape), 0
    for part in parts:
        place = x.emitting.view(out, out.meta.narrow(dim, start, part.shape[dim]))
        x.emitting.copy(part, place)
        start += part.shape[dim]
    return out


@emits(aten.stack.default)
def _stacked(x: Operation) -> Value:
    parts, out = x.args[0], x.out()
    for place, part in enumerate(parts):
        x.emitting.copy(part, x.emitting.view(out, out.meta.select(x.given["dim"], place)))
    return out


@emits(aten.constant_pad_nd.default, aten.pad.default)
def _padded(x: Operation) -> Value:
    e, one, around, out = x.emitting, x.args[0], list(x.given["pad"]), x.out()
    expect(x.given.get("mode", "constant") == "constant" and min(around) >= 0, "what is not padded with a number")
    e.copy(x.given["value"] or 0, out)
    inside = out.meta
    for place, (before, _) in enumerate(zip(around[::2], around[1::2])):
        inside = inside.narrow(-1 - place, before, one.shape[-1 - place])
    e.copy(one, e.view(out, inside))
    return out


@emits(aten.repeat.default)
def _repeated(x: Operation) -> Value:
    e, one, times, out = x.emitting, x.args[0], list(x.args[1]), x.out()
    shape = [1] * (len(times) - len(one.shape)) + [*one.shape]
    wide = out.meta.view([y for count, size in zip(times, shape) for y in (count, size)])
    source = one.meta[(None,) * (len(times) - len(one.shape))]
    for dim in range(len(times)):
        source = source.unsqueeze(2 * dim)
    e.copy(e.view(one, source), e.view(out, wide))
    return out


# -- views -------------------------------------------------------------------------------------------------------------


def _view(x: Operation) -> Any:
    """A view, by what PyTorch makes of tensors without numbers; a copy where it makes one."""
    one, result = x.args[0] if x.args else None, None
    expect(isinstance(one, Value) and _may_view(x.target), f"no instruction for {x.target}")
    result = x.bare()
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    own = one.meta.untyped_storage()._cdata
    if all(part.untyped_storage()._cdata == own for part in parts):
        views = [x.emitting.view(one, part) for part in parts]
        return views if isinstance(result, (list, tuple)) else views[0]
    same = len(parts) == 1 and parts[0].dtype == one.dtype and parts[0].numel() == one.layout.numel
    expect(same, f"no instruction for {x.target} of {one.shape}")
    out = x.emitting.copied(one)
    return x.emitting.view(out, out.meta.view(parts[0].shape))


def _may_view(target: Any) -> bool:
    if target == aten._unsafe_view.default:
        return True
    alias = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return alias is not None and not alias.is_write


def _bare(x: Any) -> Any:
    if isinstance(x, Value):
        return x.meta
    return [_bare(part) for part in x] if isinstance(x, (list, tuple)) else x


def _floating(x: Given) -> bool:
    return x.dtype.is_floating_point if isinstance(x, Value) else isinstance(x, float)


def is_supported(node: Node) -> bool:
    """Whether there may be instructions for a node of a run, by its operator alone: of ATen, and nothing that is written in place."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if target in FUNCTIONS or target == linear:
        return True
    return target.namespace == "aten" and (target == aten.sym_size.int or _may_view(target))


__all__ = ["ELEMENTWISE", "FUNCTIONS", "Operation", "emit", "emits", "is_supported"]
