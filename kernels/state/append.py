"""`semkv::append_` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Operand, UnsupportedCall, call, demand, strides_of
from semkv.kernels.cpp import Library, library
from semkv.kernels.state.numbers import CODES, FLOATS, KINDS, NUMBERS, SCALES

TEMPLATE = Path(__file__).parent / "append.cpp"


class _Side(ctypes.Structure):
    """`Side` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("into", "scale", "fresh", "width", "bits", "into_kind", "fresh_kind")),
        *((name, ctypes.c_int64 * 3) for name in ("into_strides", "scale_strides", "fresh_strides")),
    )


class _Call(ctypes.Structure):
    """`Call` of the template."""

    _fields_ = (
        ("sides", _Side * 2),
        *((name, ctypes.c_int64) for name in ("positions", "new_positions", "at", "rows", "heads", "window", "tokens")),
        ("position_stride", ctypes.c_int64),
        ("new_position_strides", ctypes.c_int64 * 2),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


@cache
def append_library() -> Library:
    """The object, one for all sizes and dtypes."""
    return library(TEMPLATE, {}, [NUMBERS])


def describe_append(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    new_positions: Tensor,
    at: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Call:
    """`append_` to numbers of 32 or 16 bits, or codes; the numbers of each vector lie one after the other. Raises `UnsupportedCall`."""
    rows, heads, window, _ = k.shape
    tokens = new_k.shape[2]
    if not 0 <= tokens <= window:
        raise UnsupportedCall(f"{tokens} tokens for a window of {window}; expected as many at most")
    demand("positions", positions, [torch.int32], (rows, 1, window))
    demand("at", at, [torch.int64], (rows,), dense=True)
    demand("new_positions", new_positions, [torch.int64], (rows, tokens))
    fields: dict[str, Operand | float | None] = {
        "positions": Operand("argument", "positions"),
        "new_positions": Operand("argument", "new_positions"),
        "at": Operand("argument", "at"),
        "rows": rows,
        "heads": heads,
        "window": window,
        "tokens": tokens,
        "position_stride": 0 if rows == 1 else positions.stride(0) * positions.itemsize,
        **strides_of("new_position_strides", new_positions, 2),
    }
    sides = (("k", k, k_scale, new_k), ("v", v, v_scale, new_v))
    for place, (name, into, scale, fresh) in enumerate(sides):
        width = into.shape[-1]
        dim = fresh.shape[-1]
        bits = 8 if scale is None or width == dim else 4
        demand(name, into, FLOATS if scale is None else CODES, (rows, heads, window, -(-dim * bits // 8)))
        demand(f"new_{name}", fresh, FLOATS, (rows, heads, tokens, dim))
        if scale is not None:
            demand(f"{name}_scale", scale, SCALES, (rows, heads, window, 1))
        side: dict[str, Operand | float | None] = {
            "into": Operand("argument", name),
            "scale": None if scale is None else Operand("argument", f"{name}_scale"),
            "fresh": Operand("argument", f"new_{name}"),
            "width": dim,
            "bits": bits,
            "into_kind": KINDS[into.dtype],
            "fresh_kind": KINDS[fresh.dtype],
            **strides_of("into_strides", into, 3),
            **strides_of("scale_strides", scale, 3),
            **strides_of("fresh_strides", fresh, 3),
        }
        fields |= {f"sides.{place}.{field}": value for field, value in side.items()}
    tensors = {"k": k, "v": v, "positions": positions, "new_k": new_k, "new_v": new_v}
    tensors |= {"new_positions": new_positions, "at": at, "k_scale": k_scale, "v_scale": v_scale}
    written = [name for name in ("k", "v", "positions", "k_scale", "v_scale") if tensors[name] is not None]
    return call(append_library(), "append_tokens", _Call, fields, tensors, written=written)


__all__ = ["append_library", "describe_append"]
