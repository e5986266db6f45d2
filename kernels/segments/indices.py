"""Operators of ATen that read and write at indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semkv.kernels.segments.emitting import Emitting
from semkv.kernels.segments.operation import Operation, aten, emits, overloads
from semkv.kernels.segments.values import Value, common, expect

FLOAT = torch.float32

SCATTERS = {"sum": "SCATTER_ADD", "amax": "SCATTER_MOST", "amin": "SCATTER_LEAST"}


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
    index, shape = _from_the_end(e, indices[dim], one.shape[dim]), [1] * len(one.shape)
    shape[dim] = index.layout.numel
    wide = [*one.shape]
    wide[dim] = index.layout.numel
    made = _gathered(e, one, dim, e.expanded(e.view(index, index.meta.view(shape)), wide))
    return e.view(made, made.meta.view(x.bare().shape))


def _from_the_end(e: Emitting, index: Value, size: int) -> Value:
    """An index, dense, whose numbers below 0 count from the end."""
    below = e.apply("BELOW", [index, 0], e.new(index.shape, torch.bool))
    other = e.apply("ADD", [index, size], e.new(index.shape, index.dtype))
    return e.apply("WHERE", [below, other, index], other)


@emits(aten.gather.default)
def _gather(x: Operation) -> Value:
    one, dim, index = x.args[:3]
    return _gathered(x.emitting, one, dim % max(1, len(one.shape)), index)


def _gathered(e: Emitting, x: Value, dim: int, index: Value) -> Value:
    """Numbers of x at an index along `dim`, which has the shape of the output."""
    _expect_index(index)
    out = e.new(index.shape, x.dtype)
    sizes, ours, theirs, along = _around(out.layout.strides, x, dim, index)
    e.step("GATHER", sizes, (out, ours), (x, theirs), (index, along), first=x.shape[dim], second=x.layout.strides[dim])
    return out


@emits(
    *overloads("scatter", "src value reduce value_reduce"),
    *overloads("scatter_add", "default"),
    *overloads("scatter_reduce", "two"),
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
    sizes, theirs, ours, along = _around(steps, out, dim, index)
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
    along: Sequence[int], x: Value, dim: int, index: Value
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes of an index; strides `along` of what has its shape, those of x but for `dim`, and those of the index."""
    others = [0 if place == dim else step for place, step in enumerate(x.layout.strides)]
    sizes, ours, theirs, own = common(index.shape, along, others, index.layout.strides)
    return sizes, ours, theirs, own


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


__all__ = ["SCATTERS"]
