"""Operators of ATen that make one number of each number."""

from __future__ import annotations

from typing import Any

import torch

from semkv.kernels.segments.emitting import Given
from semkv.kernels.segments.operation import Operation, aten, emits, overloads
from semkv.kernels.segments.values import Value, expect

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
    for overload in overloads(name, kinds)
}
"""Instruction and number of operands, which are the operator's first arguments."""
ROUNDED = ("FLOOR", "CEILING", "ROUND")
"""Of whole numbers, these are themselves."""
POWERS = {1: "COPY", 2: "SQUARE", 3: "CUBE", 0.5: "SQUARE_ROOT", -0.5: "RECIPROCAL_ROOT", -1: "RECIPROCAL"}


@emits(*ELEMENTWISE)
def _elementwise(x: Operation) -> Value:
    code, arity = ELEMENTWISE[x.target]
    if code in ROUNDED and not floating(x.args[0]):
        code = "COPY"
    return x.emitting.apply(code, x.args[:arity], x.out())


@emits(*overloads("add", "Tensor Scalar"), *overloads("sub", "Tensor Scalar"), *overloads("rsub", "Tensor Scalar"))
def _sum_of_two(x: Operation) -> Value:
    one, other = (x.given["self"], x.given["other"])
    name, alpha = x.target._schema.name, x.given.get("alpha", 1)
    if name.endswith("rsub"):
        one, other = other, one
    expect(isinstance(alpha, int) or any(floating(y) for y in (one, other)), f"whole numbers times {alpha}")
    return x.emitting.apply("ADD", [one, other], x.out(), alpha if name.endswith("::add") else -alpha)


@emits(*overloads("div", "Tensor_mode Scalar_mode"))
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


@emits(*overloads("clamp", "default Tensor"), *overloads("clamp_min", "default"), *overloads("clamp_max", "default"))
def _clamped(x: Operation) -> Value:
    made, out = x.given["self"], x.out()
    for code, bound in (("MOST", x.given.get("min")), ("LEAST", x.given.get("max"))):
        if bound is not None:
            made = x.emitting.apply(code, [made, bound], out)
    return made


@emits(*overloads("masked_fill", "Scalar Tensor"))
def _masked(x: Operation) -> Value:
    numbers, mask, value = x.args
    return x.emitting.apply("WHERE", [mask, value, numbers], x.out())


@emits(
    *overloads("to", "dtype dtype_layout device other"),
    *overloads("_to_copy", "default"),
    *overloads("clone", "default"),
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


def floating(x: Given) -> bool:
    """Whether it is no whole number."""
    return x.dtype.is_floating_point if isinstance(x, Value) else isinstance(x, float)


__all__ = ["ELEMENTWISE"]
