"""Vectors in 4 or 8 bits with one half-precision scale each: the form of summaries, indexes and quantised spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.kernels.codes import code_norms, code_products, rebuilt
from semkv.kernels.coding.cpp import coded_cpp, codes_here
from semkv.kernels.mixed_attention.streaming import scores


@dataclass(frozen=True)
class Quantized:
    """Symmetric per-vector quantisation of a tensor [..., D].

    codes: uint8 [..., D] at 8 bits, [..., ceil(D / 2)] at 4 bits (two codes a byte, low half first).
    scale: float16 [..., 1], float32 where it was computed; a code c stands for (c - 2**(bits - 1)) * scale.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    dim: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def __getitem__(self, index) -> Quantized:
        """Select along leading dimensions (the last stays whole)."""
        return Quantized(self.codes[index], self.scale[index], self.bits, self.dim)

    def clone(self) -> Quantized:
        return Quantized(self.codes.clone(), self.scale.clone(), self.bits, self.dim)


CODE_BITS = {"int8": 8, "int4": 4}
"""Bits of the forms of tokens that are codes; another form is numbers."""


Held = TypeVar("Held", Quantized, Tensor, Quantized | Tensor)


def quantize(x: Tensor, bits: int) -> Quantized:
    """Quantise the vectors of `x` [..., D] to 4 or 8 bits; all-zero vectors stay zero."""
    if bits not in (4, 8):
        raise ConfigError(f"bits {bits}: vectors are quantised to 4 or 8 bits")
    if codes_here(x):
        return Quantized(*coded_cpp(x, bits), bits, x.shape[-1])
    return quantize_plain(x, bits)


def quantize_plain(x: Tensor, bits: int) -> Quantized:
    """`quantize` in PyTorch, on any device."""
    top = 2 ** (bits - 1) - 1
    largest = x.detach().abs().amax(dim=-1, keepdim=True).float()
    half = torch.finfo(torch.float16)
    scale = (
        (largest / top).clamp(min=half.smallest_normal * half.eps, max=half.max).to(torch.float16)
    )  # subnormal at least
    codes = (x.float() / scale.float()).round().clamp(-top, top).add(2 ** (bits - 1)).to(torch.uint8)
    if bits == 4:
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1), value=8)
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return Quantized(codes, scale, bits, x.shape[-1])


def held(x: Tensor, bits: int, dtype: torch.dtype) -> Quantized | Tensor:
    """`x` [..., D] as it is held at `bits`: quantised, at 16 as numbers of `dtype`."""
    return x.to(dtype) if bits == 16 else quantize(x, bits)


def tensors_of(x: Quantized | Tensor) -> tuple[Tensor, ...]:
    """What holds it: codes and scales, or the numbers."""
    return (x.codes, x.scale) if isinstance(x, Quantized) else (x,)


def on_host(x: Quantized | Tensor) -> Quantized | Tensor:
    """The same on the host; itself where it is there."""
    return x.cpu() if isinstance(x, Tensor) else Quantized(x.codes.cpu(), x.scale.cpu(), x.bits, x.dim)


def dequantize(x: Quantized | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor [..., D] that `x` stands for, or is."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    return rebuilt(x.codes, x.scale, x.bits, x.dim, dtype)


def products(q: Tensor, x: Quantized | Tensor) -> Tensor:
    """q [H, R, D] in float32 times the vectors that x [H, M, D] stands for, or is: float32 [H, R, M]."""
    if isinstance(x, Tensor):
        return scores(q, x)
    return code_products(q, x.codes, x.bits, x.scale)


def norms(x: Quantized | Tensor) -> Tensor:
    """Lengths of the vectors that x [H, M, D] stands for, or is, float32 [H, M]."""
    if isinstance(x, Tensor):
        return x.float().norm(dim=-1)
    return code_norms(x.codes, x.bits, x.scale)


def bytes_per_vector(dim: int, bits: int, dtype: torch.dtype = torch.float16) -> int:
    """Bytes of one quantised vector with its scale; at 16 bits, of numbers of `dtype`."""
    if bits == 16:
        return dim * dtype.itemsize
    return code_width(dim, bits) + 2


def code_width(dim: int, bits: int) -> int:
    """Bytes of the codes of one vector, without its scale."""
    return (dim * bits + 7) // 8
