"""`semkv::scores` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, call, demand, strides_of
from semkv.kernels.cpp import Library, library

TEMPLATE = Path(__file__).parent / "scores.cpp"
PART = 8192
"""Numbers of a task: they fit the first cache. Sizes alone say what is summed together, so that threads change no bit."""


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("logits", "count", "out", "mass", "partial")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "queries", "size", "part")),
        ("strides", ctypes.c_int64 * 3),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


@cache
def scores_library() -> Library:
    """The object, one for all sizes."""
    return library(TEMPLATE, {})


def describe_scores(logits: Tensor, count: Tensor) -> Call:
    """`scores`; the logits of each row of queries lie one after the other. Raises `UnsupportedCall`."""
    rows, heads, queries, size = logits.shape
    demand("logits", logits, [torch.float32], logits.shape)
    demand("count", count, [torch.int64], (rows,), dense=True)
    fields: dict[str, Operand | float | None] = {
        "logits": Operand("argument", "logits"),
        "count": Operand("argument", "count"),
        "out": Operand("output", 0),
        "mass": Operand("output", 1),
        "partial": Operand("scratch", 0),
        "rows": rows,
        "heads": heads,
        "queries": queries,
        "size": size,
        "part": PART,
        **strides_of("strides", logits, 3, numbers=True),
    }
    return call(
        scores_library(),
        "state_scores",
        _Call,
        fields,
        {"logits": logits, "count": count},
        outputs=[Made((rows, heads, queries, size), torch.float32), Made((rows, heads, queries, 1), torch.float32)],
        scratch=[rows * heads * queries * -(-size // PART) * 2 * torch.float32.itemsize],
    )


__all__ = ["describe_scores", "scores_library"]
