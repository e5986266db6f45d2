"""Products of ATen: projections, and those of small matrices."""

from __future__ import annotations

from contextlib import suppress

import torch

from semkv.ir.ops import linear
from semkv.kernels.calls import OPERATORS
from semkv.kernels.segments.emitting import MOST_PARTS, Emitting, described
from semkv.kernels.segments.operation import Operation, aten, emits
from semkv.kernels.segments.values import UnsupportedNode, Value, common, expect
from semkv.kernels.state.bmm import bmm

FLOAT = torch.float32


@emits(aten.linear.default)
def _linear(x: Operation) -> Value:
    return described(
        x.emitting, OPERATORS[linear], {"x": x.given["input"], "weight": x.given["weight"], "bias": x.given["bias"]}
    )


@emits(aten.bmm.default, aten.mm.default)
def _product(x: Operation) -> Value:
    a, b = x.args
    if x.into is None:
        with suppress(UnsupportedNode):  # small, or with gaps
            return described(x.emitting, bmm, {"a": a, "b": b}, copies=False)
    return _matrix(x.emitting, a, b, x.out())


@emits(aten.matmul.default, aten.mv.default, aten.dot.default)
def _matmul(x: Operation) -> Value:
    e, (a, b), made = x.emitting, x.args[:2], x.bare()
    out = e.new(made.shape, made.dtype)
    a = e.view(a, a.meta[None]) if len(a.shape) == 1 else a
    b = e.view(b, b.meta[:, None]) if len(b.shape) == 1 else b
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    _matrix(e, a, b, e.view(out, out.meta.view(*batch, a.shape[-2], b.shape[-1])))
    return out


@emits(aten.addmm.default, aten.baddbmm.default)
def _product_and_sum(x: Operation) -> Value:
    expect(x.given["beta"] == 1 and x.given["alpha"] == 1, "a product with factors")
    return _matrix(x.emitting, x.args[1], x.args[2], x.out(), x.args[0])


def _matrix(e: Emitting, a: Value, b: Value, out: Value, more: Value | None = None) -> Value:
    """a [.., m, k] times b [.., k, n], plus what is broadcast to [.., m, n], to `out`."""
    (m, inner), n, batch = a.shape[-2:], b.shape[-1], out.shape[:-2]
    terms = [out, e.expanded(a, (*batch, m, inner)), e.expanded(b, (*batch, inner, n))]
    terms += [] if more is None else [e.expanded(more, (*batch, m, n))]
    expect(all(x.dtype == FLOAT for x in terms), f"a product of {a.dtype}")
    try:
        sizes, *steps = common(batch, *(x.layout.strides[:-2] for x in terms))
        expect(sizes[:3] == (1, 1, 1), "")
    except UnsupportedNode:  # one after the other of the first dim
        expect(batch[0] <= MOST_PARTS, f"products over {batch}")
        for place in range(batch[0]):
            _matrix(e, *_swapped([e.view(x, x.meta[place]) for x in terms]))
        return out
    last = [x.layout.strides[-2:] for x in terms]
    along = [
        (steps[0][3], *last[0], 0),
        (steps[1][3], last[1][0], 0, last[1][1]),
        (steps[2][3], 0, last[2][1], last[2][0]),
    ]
    along += [] if more is None else [(steps[3][3], *last[3], 0)]
    e.step("MATRIX", (sizes[3], m, n, inner), *zip(terms, along))
    return out


def _swapped(terms: list[Value]) -> tuple[Value, ...]:
    """Arguments of `_matrix` from its terms."""
    out, a, b, *more = terms
    return (a, b, out, *more)
