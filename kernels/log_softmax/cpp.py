"""Log-softmax of few long rows in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
PART = 8192
"""Numbers of a task: they fit the first cache. Sizes alone say what is summed together, so that threads change no bit."""


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "partial")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "part", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@cache
def log_softmax_library() -> Library:
    """The object, one for all sizes."""
    return library(TEMPLATE, {})


def log_softmax_cpp(x: Tensor) -> Tensor:
    """x float32 [..., M], contiguous: each row's log-softmax in its place.

    Raises `BuildError` where it cannot be compiled, `InputError` for any other x.
    """
    size = x.shape[-1]
    if not x.numel():
        return x
    rows = x.numel() // size
    partial = torch.empty(rows, -(-size // PART), 2, dtype=torch.float32, device="cpu")
    given = address_of("scores", x, torch.float32, x.shape)
    call = _Call(given, partial.data_ptr(), rows, size, PART, torch.get_num_threads(), team())
    log_softmax_library().function("log_softmax")(ctypes.byref(call))
    return x
