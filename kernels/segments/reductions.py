"""Operators of ATen over dims: sums, the largest and the smallest, softmax and normalisation."""

from __future__ import annotations

from typing import Any

import torch

from semkv.kernels.segments.emitting import Emitting
from semkv.kernels.segments.operation import Operation, aten, emits, overloads
from semkv.kernels.segments.values import Value, common, expect

FLOAT = torch.float32

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


@emits(*(overload for name, (_, kinds) in REDUCTIONS.items() for overload in overloads(name, kinds)))
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


__all__ = ["REDUCTIONS"]
