"""`semkv::choose` and `semkv::choose_each` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, call, demand, strides_of
from semkv.kernels.cpp import Library, library
from semkv.kernels.selection.cpp import LANES, SELECT

TEMPLATE = Path(__file__).parent / "choose.cpp"


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("score", "count", "room", "threshold", "cost", "chosen", "each")),
        *((name, ctypes.c_int64) for name in ("keys", "places", "rows", "heads", "queries", "units")),
        ("score_strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64 * 2) for name in ("threshold_strides", "cost_strides")),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


@cache
def choose_library() -> Library:
    """The object, one for all sizes."""
    return library(TEMPLATE, {}, [SELECT])


def describe_choose(
    score: Tensor,
    count: Tensor,
    room: Tensor,
    threshold: Tensor | None = None,
    cost: Tensor | None = None,
    *,
    each: bool = False,
) -> Call:
    """`choose`, or `choose_each`; the scores of each row of queries lie one after the other. Raises `UnsupportedCall`."""
    rows, heads, queries, units = score.shape
    demand("score", score, [torch.float32], score.shape)
    demand("count", count, [torch.int64], (rows,), dense=True)
    demand("room", room, [torch.int64], (rows,), dense=True)
    if threshold is not None:
        demand("threshold", threshold, [torch.float32], (heads, queries))
    if cost is not None:
        demand("cost", cost, [torch.int32], (rows, heads if cost.shape[1] == heads else 1, units))
    outputs = [Made((rows, heads, units), torch.bool)]
    if each:
        outputs.append(Made((rows, heads, queries, units), torch.bool))
    fields: dict[str, Operand | float | None] = {
        "score": Operand("argument", "score"),
        "count": Operand("argument", "count"),
        "room": Operand("argument", "room"),
        "threshold": None if threshold is None else Operand("argument", "threshold"),
        "cost": None if cost is None else Operand("argument", "cost"),
        "chosen": Operand("output", 0),
        "each": Operand("output", 1) if each else None,
        "keys": Operand("scratch", 0),
        "places": Operand("scratch", 1),
        "rows": rows,
        "heads": heads,
        "queries": queries,
        "units": units,
        **strides_of("score_strides", score, 3, numbers=True),
        **strides_of("threshold_strides", threshold, 2, numbers=True),
        **strides_of("cost_strides", cost, 2, numbers=True),
    }
    tensors = {"score": score, "count": count, "room": room, "threshold": threshold, "cost": cost}
    scratch = [rows * heads * (units + LANES) * torch.int32.itemsize] * 2
    return call(choose_library(), "choose_units", _Call, fields, tensors, outputs=outputs, scratch=scratch)


__all__ = ["choose_library", "describe_choose"]
