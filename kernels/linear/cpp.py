"""Few vectors times a matrix in C++ on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.addresses import address_of
from semkv.kernels.calls import Call, Made, Operand, UnsupportedCall, call, demand
from semkv.kernels.cpp import Library, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
MAX_TOKENS = 4
"""Vectors that are multiplied at once, at most: their sums are in registers."""
FEW_TOKENS = 16
"""Up to which the product waits for the weight: more than that are a matter of arithmetic."""


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


def describe_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    """`semkv::linear` of `FEW_TOKENS` dense vectors at most. Raises `UnsupportedCall`."""
    if weight.dim() != 2:
        raise UnsupportedCall(f"a weight of {tuple(weight.shape)}; expected a matrix")
    outer, inner = weight.shape
    demand("x", x, [torch.float32], (*x.shape[:-1], inner), dense=True)
    demand("weight", weight, [torch.float32], (outer, inner), dense=True)
    if bias is not None:
        demand("bias", bias, [torch.float32], (outer,), dense=True)
    tokens = x.numel() // max(1, inner)
    if not 0 < tokens <= FEW_TOKENS:
        raise UnsupportedCall(f"{tokens} tokens; expected 1 to {FEW_TOKENS}")
    fields: dict[str, Operand | float | None] = {
        "x": Operand("argument", "x"),
        "weight": Operand("argument", "weight"),
        "bias": None if bias is None else Operand("argument", "bias"),
        "out": Operand("output", 0),
        "tokens": tokens,
        "inner": inner,
        "outer": outer,
    }
    tensors = {"x": x, "weight": weight, "bias": bias}
    outputs = [Made((*x.shape[:-1], outer), torch.float32)]
    return call(linear_library(tokens), "linear", _Call, fields, tensors, outputs=outputs)
