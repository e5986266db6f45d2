"""Products of ATen: projections, and those of small matrices."""

from __future__ import annotations

import torch

from semkv.ir.ops import linear
from semkv.kernels.calls import OPERATORS
from semkv.kernels.segments.emitting import Emitting, described
from semkv.kernels.segments.operation import Operation, aten, emits
from semkv.kernels.segments.values import UnsupportedNode, Value, common, expect

FLOAT = torch.float32


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
