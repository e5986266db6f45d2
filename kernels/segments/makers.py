"""Operators of ATen that make tensors, and that put some one behind the other."""

from __future__ import annotations

from typing import Any

from semkv.kernels.segments.operation import Operation, aten, emits, overloads
from semkv.kernels.segments.values import Value, expect

FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
EMPTY = ("empty", "empty_like", "new_empty")
"""Makers whose numbers are written later."""


@emits(*(overload for name in FILLED for overload in overloads(name, "default")))
def _constant(x: Operation) -> Value:
    out = x.out()
    x.emitting.copy(FILLED[x.target._schema.name.split("::")[1]], out)
    return out


@emits(
    *(overload for name in ("full", "full_like", "new_full") for overload in overloads(name, "default")),
    *overloads("fill", "Scalar Tensor"),
    aten.scalar_tensor.default,
)
def _full(x: Operation) -> Value:
    out, given = x.out(), x.given
    x.emitting.copy(next(given[name] for name in ("fill_value", "value", "s") if name in given), out)
    return out


@emits(*(overload for name in EMPTY for overload in overloads(name, "default memory_format")))
def _empty(x: Operation) -> Value:
    return x.out()


@emits(*overloads("arange", "default start start_step"))
def _arange(x: Operation) -> Value:
    out, start, step = x.out(), x.given.get("start", 0), x.given.get("step", 1)
    whole = not out.dtype.is_floating_point
    expect(not whole or (isinstance(start, int) and isinstance(step, int)), "whole numbers in other steps")
    settings: dict[str, Any] = (
        {"first": start, "second": step} if whole else {"value": float(start), "second": float(step)}
    )
    x.emitting.step("COUNT", (1, 1, 1, out.layout.numel), (out, (0, 0, 0, 1)), whole=whole, **settings)
    return out


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


@emits(aten.repeat_interleave.self_int)
def _each_repeated(x: Operation) -> Value:
    e, one, times = x.emitting, x.args[0], x.args[1]
    if x.given["dim"] is None:
        one = e.dense(one)
        one = e.view(one, one.meta.view(-1))
    out, dim = x.out(), (x.given["dim"] or 0) % max(1, len(one.shape))
    e.copy(e.view(one, one.meta.unsqueeze(dim + 1)), e.view(out, out.meta.unflatten(dim, (one.shape[dim], times))))
    return out


__all__ = ["FILLED"]
