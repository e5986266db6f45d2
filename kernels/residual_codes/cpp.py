"""Codes of vectors in residual codebooks in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, compiler, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
LANES, VECTORS = 16, 256


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "books", "biases", "rest", "codes")),
        *((name, ctypes.c_int64) for name in ("heads", "count", "stages", "dim", "width", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@cache
def residual_codes_library() -> Library:
    """The object, the same for all sizes."""
    return library(TEMPLATE, {})


def residual_codes_here(x: Tensor, books: Tensor) -> bool:
    """Whether `residual_codes_cpp` finds the codes of x: on a CPU with a compiler, and no tracer looks on. Waits for the compiler."""
    here = type(x) is Tensor and x.is_cpu and books.is_cpu and books.is_contiguous() and books.shape[2] == VECTORS
    return here and compiler() is not None and residual_codes_library().failure() is None


def residual_codes_cpp(x: Tensor, books: Tensor, biases: Tensor) -> Tensor:
    """x float32 [H, n, D] -> codes uint8 [H, n, S] in books float32 [H, S, 256, D]: stage by stage which vector is nearest to what the
    stages before left, of equal ones the first. biases float32 [H, S, 256]: less the squares of the vectors' lengths. To rounding those of
    `semkv.profiles.schema.codes.Codebooks.encode`. Raises `BuildError` where the kernel cannot be compiled."""
    heads, count, dim = x.shape
    stages = books.shape[1]
    numbers, width = x.detach().contiguous(), -(-dim // LANES) * LANES
    codes = torch.empty(heads, count, stages, dtype=torch.uint8, device="cpu")
    rest = torch.empty(heads, count, width, dtype=torch.float32, device="cpu")
    call = _Call(
        address_of("vectors", numbers, torch.float32, x.shape),
        address_of("books", books, torch.float32, (heads, stages, VECTORS, dim)),
        address_of("biases", biases, torch.float32, (heads, stages, VECTORS)),
        rest.data_ptr(),
        codes.data_ptr(),
        heads,
        count,
        stages,
        dim,
        width,
        torch.get_num_threads(),
        team(),
    )
    residual_codes_library().function("residual_codes")(ctypes.byref(call))
    return codes


__all__ = ["residual_codes_cpp", "residual_codes_here", "residual_codes_library"]
