"""`semkv::products` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, UnsupportedCall, call, demand, strides_of
from semkv.kernels.code_products.cpp import SCALES
from semkv.kernels.code_products.cpp import TEMPLATE as CODE_PRODUCTS
from semkv.kernels.cpp import Library, library
from semkv.kernels.state.numbers import CODES, FLOATS, KINDS, NUMBERS

TEMPLATE = Path(__file__).parent / "products.cpp"
LANES = 16


class _Call(ctypes.Structure):
    """`Asked` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("q", "x", "scale", "out", "padded")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "queries", "count", "dim", "width", "bytes", "kind", "bits", "scale_bytes")
        ),
        *((name, ctypes.c_int64 * 3) for name in ("q_strides", "x_strides", "scale_strides")),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


@cache
def products_library() -> Library:
    """The object, one for all sizes, dtypes and bits."""
    return library(TEMPLATE, {}, [NUMBERS, CODE_PRODUCTS])


def describe_products(q: Tensor, x: Tensor, scale: Tensor | None = None, bits: int = 16) -> Call:
    """`products` with numbers of 32 or 16 bits, or codes with a scale of float16 or float32; the numbers of each vector lie one after the
    other. Raises `UnsupportedCall`."""
    rows, heads, queries, dim = q.shape
    count, packed = x.shape[2], bits != 16
    if packed and (scale is None or bits not in (4, 8)):
        raise UnsupportedCall(f"codes of {bits} bits, with or without a scale; expected 4 or 8, with a scale")
    size = -(-dim * bits // 8) if packed else dim
    demand("q", q, [torch.float32], q.shape)
    demand("x", x, CODES if packed else FLOATS, (rows, heads, count, size))
    if packed:
        demand("scale", scale, SCALES, (rows, heads, count, 1))
    width = size * 8 // bits if packed else -(-dim // LANES) * LANES
    fields: dict[str, Operand | float | None] = {
        "q": Operand("argument", "q"),
        "x": Operand("argument", "x"),
        "scale": Operand("argument", "scale") if packed else None,
        "out": Operand("output", 0),
        "padded": Operand("scratch", 0),
        "rows": rows,
        "heads": heads,
        "queries": queries,
        "count": count,
        "dim": dim,
        "width": width,
        "bytes": size,
        "kind": KINDS[x.dtype],
        "bits": bits,
        "scale_bytes": scale.itemsize if packed else 0,
        **strides_of("q_strides", q, 3, numbers=True),
        **strides_of("x_strides", x, 3),
        **(strides_of("scale_strides", scale, 3) if packed else {}),
    }
    return call(
        products_library(),
        "state_products",
        _Call,
        fields,
        {"q": q, "x": x, "scale": scale if packed else None},
        outputs=[Made((rows, heads, queries, count), torch.float32)],
        scratch=[rows * heads * queries * width * torch.float32.itemsize],
    )


__all__ = ["describe_products", "products_library"]
