"""Products with vectors that are packed codes of 4 or 8 bits, read as they are.

A code c of b bits stands for c - 2**(b - 1), times the scale of its vector. A vector of D numbers takes ceil(D * b / 8) bytes, the
first of a byte's codes in its lowest bits. On a CPU codes are unpacked in tiles that stay in the cache: what a whole unpacked index
would take, page faults included, is many times what its codes take to read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.code_products.cpp import answers, code_norms_cpp, code_products_cpp

TILE_NUMBERS = 1 << 18
"""Numbers that are unpacked at a time on a CPU: 1 MiB."""


def code_bits(codes: Tensor, dim: int) -> int:
    """4 or 8: the bits of codes [..., width] of vectors of `dim` numbers, told apart by their width.

    Raises
    ------
    InputError: codes that are not uint8, or of another width.
    """
    width = codes.shape[-1]
    if codes.dtype == torch.uint8 and width == dim:
        return 8
    if codes.dtype == torch.uint8 and width == (dim + 1) // 2:
        return 4
    raise InputError(
        f"codes are {codes.dtype} with {width} bytes a vector; expected torch.uint8 with {dim} (8 bits) or {(dim + 1) // 2} (4 bits) "
        f"for {dim} numbers"
    )


def rebuilt(codes: Tensor, scale: Tensor, bits: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [..., dim] in `dtype` that codes [..., width] of 4 or 8 bits with a scale [..., 1] stand for."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., :dim]
    return codes.to(dtype).sub_(2 ** (bits - 1)).mul_(scale.to(dtype))


def code_products(q: Tensor, codes: Tensor, bits: int, scale: Tensor | None = None) -> Tensor:
    """q [H, R, D] times codes [H, M, width] and their scale [H, M, 1], where it is given: [H, R, M] in the dtype of q.

    In float32 on a CPU a kernel in C++ computes it where there is a compiler, with a float16 or float32 scale.
    """
    if answers(codes, scale, q):
        return code_products_cpp(q, codes, bits, scale)
    asked = _by_place(q, codes.shape[-1], 8 // bits)
    out = q.new_empty(*q.shape[:2], codes.shape[1])
    for start, tile in code_tiles(codes, bits, q.dtype):
        # Queries times codes is a product with a slow kernel for few queries; the other way round it is the fast one.
        out[..., start : start + tile.shape[1]] = torch.bmm(tile, asked.mT).mT
    return out if scale is None else out.mul_(scale.to(q.dtype).mT)


def code_norms(codes: Tensor, bits: int, scale: Tensor) -> Tensor:
    """Lengths of the vectors that codes [H, M, width] with a scale [H, M, 1] stand for, float32 [H, M]."""
    if answers(codes, scale):
        return code_norms_cpp(codes, bits, scale)
    out = torch.empty(codes.shape[:2], dtype=torch.float32, device=codes.device)
    for start, tile in code_tiles(codes, bits):
        torch.linalg.vector_norm(tile, dim=-1, out=out[:, start : start + tile.shape[1]])
    return out.mul_(scale[..., 0].float())


def code_sums(weights: Tensor, codes: Tensor, bits: int, dim: int) -> Tensor:
    """weights [H, R, M] times codes [H, M, width] of `dim` numbers, before their scale: [H, R, dim] in the dtype of the weights."""
    per = 8 // bits
    out = weights.new_zeros(*weights.shape[:2], codes.shape[-1] * per)
    for start, tile in code_tiles(codes, bits, weights.dtype):
        out.baddbmm_(weights[..., start : start + tile.shape[1]], tile)
    return out.unflatten(-1, (per, -1)).mT.flatten(-2)[..., :dim]


def code_tiles(codes: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[int, Tensor]]:
    """(first row, [H, m, width * 8 / bits] in `dtype`) of packed codes uint8 [H, M, width], each valid until the next;
    the first codes of all bytes come first, then the second ones. 0 is in the middle of the codes."""
    heads, count, width = codes.shape
    per = 8 // bits
    size = max(1, count if codes.device.type != "cpu" else min(count, TILE_NUMBERS // max(1, heads * width * per)))
    buffer = torch.empty((heads, size, width * per), dtype=dtype, device=codes.device)
    for start in range(0, count, size):
        own = codes[:, start : start + size]
        tile = buffer[:, : own.shape[1]]
        for place in range(per):
            part = own if per == 1 else own >> (bits * place) & ((1 << bits) - 1)
            tile[..., place * width : (place + 1) * width] = (part - (1 << (bits - 1))).view(torch.int8)  # wraps around
        yield start, tile


def _by_place(q: Tensor, width: int, per: int) -> Tensor:
    """Columns of q [..., D] in the order in which `code_tiles` unpacks `per` codes a byte; 0 where there is no code."""
    padded = torch.nn.functional.pad(q, (0, width * per - q.shape[-1]))
    return padded.unflatten(-1, (width, per)).mT.flatten(-2)
