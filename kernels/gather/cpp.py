"""Waiting tokens to the slots of a workspace in C++ on a CPU."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
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
        *((name, ctypes.c_void_p) for name in ("pools", "heads", "places", "at")),
        *((name, ctypes.c_int64) for name in ("pool_count", "count", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@cache
def gather_library() -> Library:
    """The object, one for all shapes."""
    return library(TEMPLATE, {})


def copies_tokens(waiting: Sequence[Tensor], scales: Sequence[Tensor | None], into: Sequence[Tensor]) -> bool:
    """Whether `copy_tokens_cpp` can: on a CPU with a compiler, dense, numbers and codes that stay as they are, or codes that become
    float32."""
    kinds = all(y.dtype == (x.dtype if scale is None else torch.float32) for x, scale, y in zip(waiting, scales, into))
    given = [x for x in (*waiting, *scales, *into) if x is not None]
    dense = all(x.device.type == "cpu" and x.is_contiguous() for x in given)
    return kinds and dense and compiler() is not None and gather_library().failure() is None


def _in_file(x: Tensor) -> bool:
    return x.untyped_storage().filename is not None


def copy_tokens_cpp(
    waiting: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    into: Sequence[Tensor],
    heads: Tensor,
    places: Tensor,
    at: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Write the tokens at `places` int64 [n] of `heads` int64 [n] into the rows `at` int64 [n], as `copy_tokens_reference` does.

    waiting: [Hkv, N, D] each, keys and values, with float16 [Hkv, N, 1] in `scales` where they are codes of 8 bits; into: [rows, D] each.
    threads: that take part, by default as many as PyTorch computes with. Pages of what waits in files are asked for first.
    """
    table = array("q")
    for x, scale, out in zip(waiting, scales, into):
        rows, wide = (*x.shape[:2], 1), (out.shape[0], x.shape[2])
        table.append(address_of("waiting tokens", x, x.dtype if scale is None else torch.uint8, x.shape))
        table.append(0 if scale is None else address_of("their scales", scale, torch.float16, rows))
        table.append(address_of("a workspace", out, x.dtype if scale is None else torch.float32, wide))
        table.extend((x.shape[1], x.shape[2] * x.element_size(), _in_file(x), scale is not None and _in_file(scale)))
    which = tuple(x.contiguous() for x in (heads, places, at))
    call = _Call(
        table.buffer_info()[0],
        *(address_of("an index", x, torch.int64, at.shape) for x in which),
        len(waiting),
        len(at),
        threads or torch.get_num_threads(),
        team(),
    )
    gather_library().function("copy_tokens")(ctypes.byref(call))
