"""Vectors in 4 or 8 bits with one half-precision scale each: the form of summaries, indexes and quantised spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.errors import ConfigError

TILE_NUMBERS = 1 << 18
"""Numbers that are unpacked at a time on a CPU: 1 MiB."""


@dataclass(frozen=True)
class Quantized:
    """Symmetric per-vector quantisation of a tensor [..., D].

    codes: uint8 [..., D] at 8 bits, [..., ceil(D / 2)] at 4 bits (two codes a byte, low half first).
    scale: float16 [..., 1]; a code c stands for (c - 2**(bits - 1)) * scale.
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


def quantize(x: Tensor, bits: int) -> Quantized:
    """Quantise the vectors of `x` [..., D] to 4 or 8 bits; all-zero vectors stay zero."""
    if bits not in (4, 8):
        raise ConfigError(f"bits {bits}: vectors are quantised to 4 or 8 bits")
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


def dequantize(x: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor [..., D] that `x` stands for."""
    codes = x.codes
    if x.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., : x.dim]
    return codes.to(dtype).sub_(2 ** (x.bits - 1)).mul_(x.scale.to(dtype))


def products(q: Tensor, x: Quantized) -> Tensor:
    """q [H, R, D] in float32 times the vectors that x [H, M, D] stands for: float32 [H, R, M]."""
    return code_products(q, x.codes, x.bits).mul_(x.scale.to(q.dtype).transpose(1, 2))


def norms(x: Quantized) -> Tensor:
    """Lengths of the vectors that x [H, M, D] stands for, float32 [H, M]."""
    out = torch.empty(x.codes.shape[:2], device=x.codes.device)
    for start, tile in _tiles(x.codes, x.bits):
        torch.linalg.vector_norm(tile, dim=-1, out=out[:, start : start + tile.shape[1]])
    return out.mul_(x.scale[..., 0].float())


def code_products(q: Tensor, codes: Tensor, bits: int) -> Tensor:
    """q [H, R, D] in float32 times packed codes, of which c stands for c - 2**(bits - 1): float32 [H, R, M].

    codes: uint8 [H, M, ceil(D * bits / 8)], `bits` of 1, 2, 4 or 8, the first of a byte's codes in its lowest bits. On a CPU they
    are unpacked in tiles that stay in the cache: what a whole unpacked index would take, page faults included, is many times
    what its codes take to read.
    """
    asked = _by_place(q, codes.shape[-1], 8 // bits)
    out = torch.empty(*q.shape[:2], codes.shape[1], device=q.device)
    for start, tile in _tiles(codes, bits):
        # Queries times rows of codes is a product with a slow kernel for few queries; times columns it is the fast one.
        part = torch.bmm(asked, tile.mT) if _in_columns(codes) else torch.bmm(tile, asked.mT).mT
        out[..., start : start + tile.shape[1]] = part
    return out


def _in_columns(codes: Tensor) -> bool:
    return codes.stride(1) == 1 and codes.shape[2] > 1


def _by_place(q: Tensor, width: int, per: int) -> Tensor:
    """Columns of q [..., D] in the order in which `_tiles` unpacks `per` codes a byte; 0 where there is no code."""
    padded = torch.nn.functional.pad(q, (0, width * per - q.shape[-1]))
    return padded.unflatten(-1, (width, per)).mT.flatten(-2)


def _tiles(codes: Tensor, bits: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, float32 [H, m, width * 8 / bits]) of packed codes uint8 [H, M, width], each valid until the next and laid out as
    the codes are; the first codes of all bytes come first, then the second ones. 0 is in the middle of the codes."""
    heads, count, width = codes.shape
    per = 8 // bits
    size = max(1, count if codes.device.type != "cpu" else min(count, TILE_NUMBERS // max(1, heads * width * per)))
    shape = (heads, width * per, size) if _in_columns(codes) else (heads, size, width * per)
    buffer = torch.empty(shape, device=codes.device)
    buffer = buffer.mT if _in_columns(codes) else buffer
    for start in range(0, count, size):
        own = codes[:, start : start + size]
        tile = buffer[:, : own.shape[1]]
        for place in range(per):
            part = own if per == 1 else own >> (bits * place) & ((1 << bits) - 1)
            tile[..., place * width : (place + 1) * width] = (part - (1 << (bits - 1))).view(torch.int8)  # wraps around
        yield start, tile


def concatenate(parts: list[Quantized], dim: int) -> Quantized:
    """Join tensors of one kind along a leading dimension."""
    return Quantized(
        torch.cat([part.codes for part in parts], dim),
        torch.cat([part.scale for part in parts], dim),
        parts[0].bits,
        parts[0].dim,
    )


def bytes_per_vector(dim: int, bits: int) -> int:
    """Bytes of one quantised vector with its scale."""
    return (dim * bits + 7) // 8 + 2
