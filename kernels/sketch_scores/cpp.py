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
ROWS = 8
"""Rows of queries that a lookup answers at once: their numbers lie together."""


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "codes", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "groups", "count", "stages", "head_stride", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@cache
def lookup_library() -> Library:
    """The object, one for all sizes."""
    return library(TEMPLATE, {})


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
    count, groups = codes.shape[1], -(-rows // ROWS)
    padded = torch.nn.functional.pad(tables, (0, 0, 0, 0, 0, groups * ROWS - rows))
    together = padded.unflatten(1, (groups, ROWS)).permute(0, 1, 3, 4, 2).contiguous()  # [H, groups, S, V, ROWS]
    out = tables.new_empty(heads, rows, count)
    call = _Call(
        address_of("tables", together, torch.float32, (heads, groups, stages, VECTORS, ROWS)),
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
    lookup_library().function("sketch_logits")(ctypes.byref(call))
    return out
