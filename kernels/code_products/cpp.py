"""Products with packed codes in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, compiler, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
SCALES = (torch.float16, torch.float32)


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "codes", "scale", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "count", "width", "bits", "threads")),
        *((name, ctypes.c_int64) for name in ("head_stride", "vector_stride")),
        *((name, ctypes.c_int64) for name in ("scale_head_stride", "scale_vector_stride", "scale_bytes")),
        ("parallel", ctypes.c_void_p),
    )


@cache
def code_library() -> Library:
    """The object, the same for all sizes and bits."""
    return library(TEMPLATE, {})


def answers(codes: Tensor, scale: Tensor | None, q: Tensor | None = None) -> bool:
    """Whether the functions below compute this: in float32 on a CPU with a compiler, without gradients. Waits for the compiler."""
    if codes.device.type != "cpu" or compiler() is None or (scale is not None and scale.dtype not in SCALES):
        return False
    if q is not None and (
        q.dtype != torch.float32 or q.device.type != "cpu" or (torch.is_grad_enabled() and q.requires_grad)
    ):
        return False
    return code_library().failure() is None


def code_products_cpp(q: Tensor, codes: Tensor, bits: int, scale: Tensor | None = None) -> Tensor:
    """float32 q [H, R, D] times codes uint8 [H, M, ceil(D * bits / 8)] of 4 or 8 bits: float32 [H, R, M].

    scale: float16 or float32 [H, M, 1] of the vectors; None: 1. Raises `BuildError` where the kernel cannot be compiled, `InputError` for
    other dtypes, devices or sizes.
    """
    codes = codes if codes.stride(2) == 1 else codes.contiguous()
    if q.shape[0] != codes.shape[0] or q.shape[2] * bits > codes.shape[2] * 8:
        raise InputError(
            f"queries {tuple(q.shape)} for codes {tuple(codes.shape)} of {bits} bits; expected heads and numbers alike"
        )
    asked = torch.nn.functional.pad(q, (0, codes.shape[2] * 8 // bits - q.shape[2])).contiguous()
    out = q.new_empty(*q.shape[:2], codes.shape[1])
    _call("code_products", asked, codes, bits, scale, out)
    return out


def code_norms_cpp(codes: Tensor, bits: int, scale: Tensor) -> Tensor:
    """Lengths of the vectors that codes uint8 [H, M, width] with a scale float16 or float32 [H, M, 1] stand for: float32 [H, M]."""
    out = torch.empty(codes.shape[0], 1, codes.shape[1], dtype=torch.float32, device="cpu")
    _call("code_norms", None, codes if codes.stride(2) == 1 else codes.contiguous(), bits, scale, out)
    return out[:, 0]


def _scale_dtype(scale: Tensor) -> torch.dtype:
    """The dtype that a scale has, where the kernel reads it, else one that it reads."""
    return scale.dtype if scale.dtype in SCALES else SCALES[0]


def _call(name: str, q: Tensor | None, codes: Tensor, bits: int, scale: Tensor | None, out: Tensor) -> None:
    heads, rows, count = out.shape
    width = codes.shape[2]
    size = 0 if scale is None else scale.element_size()
    along = (0, 0, 0) if scale is None else (scale.stride(0) * size, scale.stride(1) * size, size)
    call = _Call(
        None if q is None else address_of("queries", q, torch.float32, (heads, rows, width * 8 // bits)),
        address_of("codes", codes, torch.uint8, (heads, count, width), dense=False),
        None if scale is None else address_of("scales", scale, _scale_dtype(scale), (heads, count, 1), dense=False),
        address_of("a result", out, torch.float32, (heads, rows, count)),
        heads,
        rows,
        count,
        width,
        bits,
        torch.get_num_threads(),
        *codes.stride()[:2],
        *along,
        team(),
    )
    code_library().function(name)(ctypes.byref(call))
