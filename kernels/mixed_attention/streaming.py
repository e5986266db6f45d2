"""The two products of attention with few queries: memory is read once, and at the speed at which it can be read.

Of the ways that PyTorch has, these were the fastest on a CPU for two queries per KV head (benchmarks/speed/decode_cpu.py times the others):
keys times queries, not queries times keys, whose matrix product has a slow kernel for few rows where the processor is not Intel's (on
Intel's it is the faster one, and the more exact); and for values a weighted `embedding_bag`, faster than any matrix product.
Half-precision entries are converted in tiles that stay in the cache, and so are codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.codes import code_bits, code_products, code_sums, rebuilt

FEW_ROWS = 16
"""Query rows per KV head up to which streaming is faster than a matrix product."""
TILE_NUMBERS = 1 << 18
"""Numbers of a tile that is converted: 1 MiB in float32."""
BAG = 64
"""Entries that are summed one after the other; sums of more would be less exact than a matrix product's, and are no faster."""


def scores(q: Tensor, k: Tensor, scale: Tensor | None = None) -> Tensor:
    """q [H, R, D] in the compute dtype, k [H, N, D] in any, or codes with their scale [H, N, 1] -> q.k [H, R, N]."""
    if scale is not None:
        bits = code_bits(k, q.shape[-1])
        if _has_gradient(q):
            return q @ rebuilt(k, scale, bits, q.shape[-1], q.dtype).mT
        return code_products(q, k, bits, scale)
    if not _streams(q, k):
        return q @ k.to(q.dtype).mT
    product = _of_queries if _is_intel() else _of_keys
    parts = [product(q, tile) for tile in _tiles(k, q.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _of_keys(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(k, q.mT).mT


def _of_queries(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(q, k.mT)


@cache
def _is_intel() -> bool:
    """Whether the processor is Intel's, as far as the system says."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False


def weighted_sum(weights: Tensor, v: Tensor, scale: Tensor | None = None, dim: int = 0) -> Tensor:
    """weights [H, R, N] in the compute dtype, v [H, N, Dv] in any, or codes of vectors of `dim` numbers with their scale [H, N, 1]
    -> [H, R, Dv]."""
    if scale is not None:
        bits = code_bits(v, dim)
        if _has_gradient(weights):
            return weights @ rebuilt(v, scale, bits, dim, weights.dtype)
        return code_sums(weights * scale.to(weights.dtype).mT, v, bits, dim)
    if not _streams(weights, v) or weights.dtype != torch.float32:
        return weights @ v.to(weights.dtype)
    out = weights.new_zeros(*weights.shape[:2], v.shape[2])
    at = 0
    for tile in _tiles(v, weights.dtype):
        own = weights[:, :, at : at + tile.shape[1]]
        at += tile.shape[1]
        whole = tile.shape[1] // BAG * BAG
        for start, end, bag in ((0, whole, BAG), (whole, tile.shape[1], tile.shape[1] - whole)):
            if end > start:
                out += _bags(own[:, :, start:end], tile[:, start:end], bag)
    return out


def _streams(few: Tensor, entries: Tensor) -> bool:
    """Whether streaming applies: on a CPU, few rows, and nothing that a gradient has to flow through."""
    graph = _has_gradient(few) or _has_gradient(entries)
    return few.device.type == "cpu" and 0 < few.shape[1] <= FEW_ROWS and entries.numel() > 0 and not graph


def _has_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _tiles(x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """x [H, N, D] in `dtype`: whole where it is that already, else in tiles along N, each valid until the next."""
    if x.dtype == dtype:
        yield x
        return
    heads, count, dim = x.shape
    size = min(count, max(64, TILE_NUMBERS // (heads * dim)))
    buffer = torch.empty(heads, size, dim, dtype=dtype, device="cpu")
    for start in range(0, count, size):
        tile = buffer[:, : min(size, count - start)]
        yield tile.copy_(x[:, start : start + size])


def _bags(weights: Tensor, v: Tensor, bag: int) -> Tensor:
    """`weights @ v` for N a multiple of `bag`: a bag of entries per head and row, whose rows follow one another so that all but
    the first find the entries in the cache."""
    heads, rows, count = weights.shape
    step, width, inner = v.stride()
    if inner != 1 or width != v.shape[2] or (step % max(1, width) and heads > 1):
        v = v.contiguous()
        step, width = v.stride(0), v.stride(1)
    length = (heads - 1) * (step // width) + count
    table = v.as_strided((length, v.shape[2]), (width, 1))
    first = torch.arange(0, heads * (step // width), max(1, step // width), dtype=torch.int32, device="cpu")[:heads]
    index = first[:, None] + torch.arange(count, dtype=torch.int32, device="cpu")
    index = index.view(heads, -1, 1, bag).expand(-1, -1, rows, -1).reshape(-1)
    own = weights.unflatten(2, (-1, bag)).transpose(1, 2).reshape(-1)
    offsets = torch.arange(0, len(index), bag, dtype=torch.int32, device="cpu")
    sums = torch.embedding_bag(table, index, offsets, False, 0, False, own)[0]
    return sums.view(heads, -1, rows, v.shape[2]).sum(1)
