"""Sketch scores in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
VECTORS = 256
SIZES = (4, 8)
"""Rows of queries that a lookup may answer at once: their numbers lie together."""


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "codes", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "groups", "count", "stages", "head_stride", "threads")),
        ("parallel", ctypes.c_void_p),
    )


def together(rows: int) -> int:
    """How many of `rows` queries a lookup answers at once: no more than there are, so that tables stay in the nearest cache."""
    return next((size for size in SIZES if rows <= size), SIZES[-1])


@cache
def lookup_library(size: int) -> Library:
    """The object for `size` rows at once, of `SIZES`."""
    return library(TEMPLATE, {"ROWS": size})


def sketch_logits_cpp(tables: Tensor, codes: Tensor) -> Tensor:
    """float32 [H, R, M] of tables float32 [H, R, S, 256] and codes uint8 [H, M, S], as `sketch_logits_reference`.

    Raises `BuildError` where the kernel cannot be compiled, `InputError` for other dtypes, devices or sizes.
    """
    heads, rows, stages, vectors = tables.shape
    if vectors != VECTORS or codes.shape[::2] != (heads, stages):
        raise InputError(
            f"tables {tuple(tables.shape)} for codes {tuple(codes.shape)}; expected as many heads and stages, and {VECTORS} vectors"
        )
    codes = codes if codes.stride()[1:] == (stages, 1) else codes.contiguous()
    count, size = codes.shape[1], together(rows)
    groups = -(-rows // size)
    padded = torch.nn.functional.pad(tables, (0, 0, 0, 0, 0, groups * size - rows))
    joined = padded.unflatten(1, (groups, size)).permute(0, 1, 3, 4, 2).contiguous()  # [H, groups, S, V, size]
    out = tables.new_empty(heads, rows, count)
    call = _Call(
        address_of("tables", joined, torch.float32, (heads, groups, stages, VECTORS, size)),
        address_of("codes", codes, torch.uint8, (heads, count, stages), dense=False),
        address_of("a result", out, torch.float32, (heads, rows, count)),
        heads,
        rows,
        groups,
        count,
        stages,
        codes.stride(0),
        torch.get_num_threads(),
        team(),
    )
    lookup_library(size).function("sketch_logits")(ctypes.byref(call))
    return out
