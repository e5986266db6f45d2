"""Codes of vectors in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, compiler, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scale")),
        *((name, ctypes.c_int64) for name in ("count", "dim", "bits", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@cache
def coding_library() -> Library:
    """The object, the same for all sizes and bits."""
    return library(TEMPLATE, {})


def codes_here(x: Tensor) -> bool:
    """Whether `coded_cpp` computes the codes of x: on a CPU with a compiler, and no tracer looks on. Waits for the compiler."""
    return type(x) is Tensor and x.is_cpu and compiler() is not None and coding_library().failure() is None


def coded_cpp(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [..., D] of any dtype -> codes uint8 [..., ceil(D * bits / 8)] of 4 or 8 bits and scales float16 [..., 1], to the bit those of
    `semkv.runtime.store.quantization.quantize` in PyTorch. Raises `BuildError` where the kernel cannot be compiled."""
    numbers = x.detach().float().contiguous()
    *lead, dim = x.shape
    codes = torch.empty(*lead, (dim * bits + 7) // 8, dtype=torch.uint8, device="cpu")
    scale = torch.empty(*lead, 1, dtype=torch.float16, device="cpu")
    call = _Call(
        address_of("vectors", numbers, torch.float32, x.shape),
        codes.data_ptr(),
        scale.data_ptr(),
        scale.numel(),
        dim,
        bits,
        torch.get_num_threads(),
        team(),
    )
    coding_library().function("coded")(ctypes.byref(call))
    return codes, scale


__all__ = ["coded_cpp", "codes_here", "coding_library"]
