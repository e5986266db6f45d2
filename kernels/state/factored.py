"""`semkv::factored_attention_` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, UnsupportedCall, call, demand, layout_of, strides_of
from semkv.kernels.cpp import Library, library
from semkv.kernels.state.numbers import FLOATS, KINDS, NUMBERS

TEMPLATE = Path(__file__).parent / "factored.cpp"


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("q", "chosen", "own", "held", "data", "where", "spans", "unit", "asked")),
        *((name, ctypes.c_int64) for name in ("value", "mass", "told", "counts", "scratch")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "queries", "units", "count", "dim", "value_dim", "kind")
        ),
        *((name, ctypes.c_int64) for name in ("longest", "rank", "room", "window")),
        ("q_strides", ctypes.c_int64 * 3),
        ("chosen_strides", ctypes.c_int64 * 2),
        ("own_strides", ctypes.c_int64 * 3),
        ("held_strides", ctypes.c_int64 * 2),
        ("data_stride", ctypes.c_int64),
        ("where_strides", ctypes.c_int64 * 2),
        ("spans_stride", ctypes.c_int64),
        ("unit_strides", ctypes.c_int64 * 2),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("threads", "parallel")),
    )


@cache
def factored_library() -> Library:
    """The object, one for all sizes and dtypes."""
    return library(TEMPLATE, {}, [NUMBERS])


def describe_factored(
    q: Tensor,
    chosen: Tensor,
    held: Tensor,
    data: Tensor,
    where: Tensor,
    spans: Tensor,
    unit: Tensor,
    asked: Tensor,
    value_dim: int,
    longest: int,
    rank: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    own: Tensor | None = None,
) -> Call:
    """`factored_attention_` of factors in numbers of 32 or 16 bits; those of each vector lie one after the other. Raises
    `UnsupportedCall`."""
    rows, heads, queries, dim = q.shape
    units, count = chosen.shape[2], where.shape[2]
    demand("q", q, [torch.float32], q.shape)
    demand("chosen", chosen, [torch.bool], (rows, heads, units))
    demand("held", held, [torch.bool], (rows, heads, count))
    demand("data", data, FLOATS, (rows, data.shape[1]))
    demand("where", where, [torch.int64], (rows, heads, count, 3))
    demand("spans", spans, [torch.int64], (rows, count, 2))
    demand("unit", unit, [torch.int64], (rows, heads if unit.shape[1] == heads else 1, count))
    demand("asked", asked, [torch.int64], (rows,), dense=True)
    for name, x, width in (("where", where, 3), ("spans", spans[:, None], 2)):
        if count > 1 and x.stride(2) != width:
            raise UnsupportedCall(f"{name} {layout_of(x)}; expected spans one behind the other")
    if own is not None:
        demand("own", own, [torch.bool], (rows, heads, queries, units))
    room = rank * (2 * longest + 2 + dim + value_dim) + queries + rank + longest
    tensors = {"q": q, "chosen": chosen, "held": held, "data": data, "where": where, "spans": spans, "unit": unit}
    tensors["asked"] = asked
    fields: dict[str, Operand | float | None] = {
        **{name: Operand("argument", name) for name in tensors},
        "own": None if own is None else Operand("argument", "own"),
        **{name: Operand("output", place) for place, name in enumerate(("value", "mass", "told"))},
        **{name: Operand("scratch", place) for place, name in enumerate(("counts", "scratch"))},
        **{"rows": rows, "heads": heads, "queries": queries, "units": units, "count": count, "dim": dim},
        **{"value_dim": value_dim, "kind": KINDS[data.dtype], "longest": longest, "rank": rank, "room": room},
        **{"window": window, "scale": scale, "softcap": softcap},
        **strides_of("q_strides", q, 3, numbers=True),
        **strides_of("chosen_strides", chosen, 2),
        **(strides_of("own_strides", own, 3) if own is not None else {}),
        **strides_of("held_strides", held, 2),
        **strides_of("where_strides", where, 2, numbers=True),
        **strides_of("unit_strides", unit, 2, numbers=True),
        "data_stride": data.stride(0),
        "spans_stride": spans.stride(0),
    }
    return call(
        factored_library(),
        "factored_attention",
        _Call,
        fields,
        {**tensors, "own": own},
        outputs=[
            Made((rows, heads, queries, value_dim), torch.float32),
            Made((rows, heads, queries), torch.float32),
            Made((rows, 2), torch.int64),
        ],
        scratch=[rows * heads * 2 * 8, rows * heads * room * 4],
        written=["held"],
    )


__all__ = ["describe_factored", "factored_library"]
