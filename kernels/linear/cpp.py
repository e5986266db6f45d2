"""Few vectors times a matrix in C++ on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
MAX_TOKENS = 4
"""Vectors that are multiplied at once, at most: their sums are in registers."""


class _Call(ctypes.Structure):
    """`Product` of kernels/products.h, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "inner", "outer", "threads")),
        ("parallel", ctypes.c_void_p),
    )


def linear_library(tokens: int) -> Library:
    """The object for that many vectors."""
    return library(TEMPLATE, {"TOKENS": min(tokens, MAX_TOKENS)})


def linear_cpp(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32 x [..., K] times weight [N, K], contiguous, plus bias [N] -> [..., N].

    Raises `BuildError` where it cannot be compiled, `InputError` for other dtypes, devices or sizes.
    """
    outer, inner = weight.shape
    asked, out = x.contiguous(), x.new_empty(*x.shape[:-1], outer)
    tokens = asked.numel() // inner
    call = _Call(
        address_of("vectors", asked, torch.float32, (*x.shape[:-1], inner)),
        address_of("a weight", weight, torch.float32, (outer, inner)),
        None if bias is None else address_of("a bias", bias.contiguous(), torch.float32, (outer,)),
        out.data_ptr(),
        tokens,
        inner,
        outer,
        torch.get_num_threads(),
        team(),
    )
    linear_library(tokens).function("linear")(ctypes.byref(call))
    return out
