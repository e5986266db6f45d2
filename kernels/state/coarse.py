"""`semkv::coarse_attention` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, call, demand, strides_of
from semkv.kernels.cpp import Library, library
from semkv.kernels.sketch_scores.cpp import VECTORS, together
from semkv.kernels.state.numbers import CODES

TEMPLATE = Path(__file__).parent / "coarse.cpp"
LANES = 16
LEAST_PART, MOST_TASKS = 4096, 64
"""Units of a part, whose sums are apart, and parts in all. Sizes alone say what is summed together, so that threads change no bit."""


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("score", "shift", "chosen", "own", "count", "codes", "books", "mean")),
        *((name, ctypes.c_int64) for name in ("value", "mass", "partial")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "queries", "units", "stages", "dim", "groups", "parts", "part")
        ),
        *((name, ctypes.c_int64 * 3) for name in ("score_strides", "shift_strides")),
        ("chosen_strides", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64 * 3) for name in ("own_strides", "code_strides")),
        ("softcap", ctypes.c_double),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


@cache
def coarse_library(size: int) -> Library:
    """The object for `size` rows of queries at once, see `together`."""
    return library(TEMPLATE, {"TOGETHER": size})


def describe_coarse(
    score: Tensor,
    shift: Tensor,
    chosen: Tensor,
    count: Tensor,
    codes: Tensor,
    books: Tensor,
    mean: Tensor,
    softcap: float = 0.0,
    own: Tensor | None = None,
) -> Call:
    """`coarse_attention`; scores and flags of each row lie one after the other. Raises `UnsupportedCall`."""
    rows, heads, queries, units = score.shape
    stages, dim = codes.shape[3], books.shape[3]
    demand("score", score, [torch.float32], score.shape)
    demand("shift", shift, [torch.float32], (rows, heads, queries, 1))
    demand("chosen", chosen, [torch.bool], (rows, heads, units))
    demand("count", count, [torch.int64], (rows,), dense=True)
    demand("codes", codes, CODES, (rows, heads, units, stages))
    demand("books", books, [torch.float32], (heads, stages, VECTORS, dim), dense=True)
    demand("mean", mean, [torch.float32], (heads, dim), dense=True)
    if own is not None:
        demand("own", own, [torch.bool], score.shape)
    size = together(queries)
    groups = -(-queries // size)
    step = max(1, MOST_TASKS // max(1, rows * heads * groups)) * LANES
    part = max(LEAST_PART, -(-units // step) * LANES)
    parts = max(1, -(-units // part))
    tensors = {
        "score": score,
        "shift": shift,
        "chosen": chosen,
        "count": count,
        "codes": codes,
        "books": books,
        "mean": mean,
    }
    fields: dict[str, Operand | float | None] = {
        **{name: Operand("argument", name) for name in tensors},
        "own": None if own is None else Operand("argument", "own"),
        "value": Operand("output", 0),
        "mass": Operand("output", 1),
        "partial": Operand("scratch", 0),
        "rows": rows,
        "heads": heads,
        "queries": queries,
        "units": units,
        "stages": stages,
        "dim": dim,
        "groups": groups,
        "parts": parts,
        "part": part,
        "softcap": softcap,
        **strides_of("score_strides", score, 3, numbers=True),
        **strides_of("shift_strides", shift, 3, numbers=True),
        **strides_of("chosen_strides", chosen, 2),
        **(strides_of("own_strides", own, 3) if own is not None else {}),
        **strides_of("code_strides", codes, 3),
    }
    sums = (stages * VECTORS + 2) * size
    return call(
        coarse_library(size),
        "coarse_attention",
        _Call,
        fields,
        {**tensors, "own": own},
        outputs=[Made((rows, heads, queries, dim), torch.float32), Made((rows, heads, queries), torch.float32)],
        scratch=[rows * heads * groups * parts * sums * torch.float32.itemsize],
    )


__all__ = ["coarse_library", "describe_coarse"]
