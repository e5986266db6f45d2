"""Few vectors times a matrix in C++ on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

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
    )  # fmt: skip


def linear_library(tokens: int) -> Library:
    """The object for that many vectors."""
    return library(TEMPLATE, {"TOKENS": min(tokens, MAX_TOKENS)})


def linear_cpp(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32 x [..., K] times weight [N, K], contiguous, plus bias [N] -> [..., N]. Raises `BuildError` where it cannot be compiled."""
    asked, out = x.contiguous(), x.new_empty(*x.shape[:-1], len(weight))
    bias = None if bias is None else bias.contiguous()
    tokens = asked.numel() // weight.shape[1]
    call = _Call(
        *(None if y is None else y.data_ptr() for y in (asked, weight, bias, out)), tokens, weight.shape[1], len(weight),
        torch.get_num_threads(), team(),
    )  # fmt: skip
    linear_library(tokens).function("linear")(ctypes.byref(call))
    return out
