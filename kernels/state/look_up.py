"""`semkv::look_up` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, UnsupportedCall, call, demand, strides_of
from semkv.kernels.cpp import Library, library
from semkv.kernels.sketch_scores.cpp import TEMPLATE as SKETCH_SCORES
from semkv.kernels.sketch_scores.cpp import VECTORS, together
from semkv.kernels.state.numbers import CODES

TEMPLATE = Path(__file__).parent / "look_up.cpp"


class _Call(ctypes.Structure):
    """`Asked` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tables", "codes", "out", "together")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "queries", "groups", "count", "stages")),
        ("table_strides", ctypes.c_int64 * 5),
        ("code_strides", ctypes.c_int64 * 2),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


@cache
def look_up_library(size: int) -> Library:
    """The object for `size` rows of queries at once, see `together`."""
    return library(TEMPLATE, {"ROWS": size}, [SKETCH_SCORES])


def describe_look_up(tables: Tensor, codes: Tensor) -> Call:
    """`look_up`; a unit's codes lie behind those of the one before. Raises `UnsupportedCall`."""
    rows, heads, queries, stages, _ = tables.shape
    count = codes.shape[2]
    if tables.dtype != torch.float32 or tables.shape[4] != VECTORS:
        raise UnsupportedCall(
            f"tables {tables.dtype} of {tables.shape[4]} vectors; expected torch.float32 of {VECTORS}"
        )
    demand("codes", codes, CODES, (rows, heads, count, stages))
    if count > 1 and codes.stride(2) != stages:
        raise UnsupportedCall("codes with gaps between units; expected none")
    size = together(queries)
    groups = -(-queries // size)
    fields: dict[str, Operand | float | None] = {
        "tables": Operand("argument", "tables"),
        "codes": Operand("argument", "codes"),
        "out": Operand("output", 0),
        "together": Operand("scratch", 0),
        "rows": rows,
        "heads": heads,
        "queries": queries,
        "groups": groups,
        "count": count,
        "stages": stages,
        **strides_of("table_strides", tables, 5, numbers=True),
        **strides_of("code_strides", codes, 2),
    }
    return call(
        look_up_library(size),
        "state_look_up",
        _Call,
        fields,
        {"tables": tables, "codes": codes},
        outputs=[Made((rows, heads, queries, count), torch.float32)],
        scratch=[rows * heads * groups * stages * VECTORS * size * torch.float32.itemsize],
    )


__all__ = ["describe_look_up", "look_up_library"]
