"""Few rows times a matrix each, in C++ on a CPU: `torch.bmm`, and `torch.matmul` of tensors with two dims of matrices."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, Operator, UnsupportedCall, call, layout_of, strides_of
from semkv.kernels.cpp import Library, library

TEMPLATE = Path(__file__).parent / "bmm.cpp"
MAX_ROWS = 8
"""Rows of a product, at most: more than that are a matter of arithmetic."""
WIDE, NARROW, MANY_TASKS = 1024, 256, 4
"""Columns of a task: as many as fit the first cache where that many tasks are left, else fewer. They change no bit."""


class _Call(ctypes.Structure):
    """`Asked` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("a", "b", "out")),
        *((name, ctypes.c_int64) for name in ("outer", "batch", "rows", "inner", "columns", "turned", "chunk")),
        ("a_strides", ctypes.c_int64 * 4),
        ("b_strides", ctypes.c_int64 * 3),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


@cache
def bmm_library() -> Library:
    """The object, one for all sizes."""
    return library(TEMPLATE, {})


def describe_bmm(a: Tensor, b: Tensor) -> Call:
    """float32 a [N.., R, K] times b [N.., K, M] -> [N.., R, M], of at most `MAX_ROWS` rows and two dims N, which may be expanded.

    The rows of each matrix of b lie dense, whatever is between them; or its columns do, one after the other, and a's rows.
    Raises `UnsupportedCall`.
    """
    alike = a.dim() == b.dim() and (*a.shape[:-2], a.shape[-1]) == b.shape[:-1]
    if not 2 <= a.dim() <= 4 or not alike or {a.dtype, b.dtype} != {torch.float32}:
        raise UnsupportedCall(
            f"{layout_of(a)} times {layout_of(b)}; expected as many matrices, in two dims at most, of torch.float32"
        )
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    if not 0 < rows <= MAX_ROWS or not inner:
        raise UnsupportedCall(f"{rows} rows of {inner} numbers; expected 1 to {MAX_ROWS}, of one or more")
    turned = inner > 1 and b.stride(-2) == 1 and (columns == 1 or b.stride(-1) == inner)
    if not turned and columns > 1 and b.stride(-1) != 1:
        raise UnsupportedCall(f"b {layout_of(b)}; expected matrices whose rows are dense, or whose columns are")
    if turned and (a.stride(-1) != 1 or (rows > 1 and a.stride(-2) != inner)):
        raise UnsupportedCall(f"a {layout_of(a)}; expected dense matrices")
    whole, other = (x[(None,) * (4 - x.dim())] for x in (a, b))
    outer, batch = whole.shape[:2]
    chunk = WIDE if outer * batch * -(-columns // WIDE) >= MANY_TASKS else NARROW
    fields: dict[str, Operand | float | None] = {
        "a": Operand("argument", "a"),
        "b": Operand("argument", "b"),
        "out": Operand("output", 0),
        "outer": outer,
        "batch": batch,
        "rows": rows,
        "inner": inner,
        "columns": columns,
        "turned": turned,
        "chunk": chunk,
        **strides_of("a_strides", whole, 4, numbers=True),
        **strides_of("b_strides", other, 3, numbers=True),
    }
    outputs = [Made((*a.shape[:-1], columns), torch.float32)]
    return call(bmm_library(), "bmm", _Call, fields, {"a": a, "b": b}, outputs=outputs)


def bmm_reference(a: Tensor, b: Tensor) -> Tensor:
    """a [N.., R, K] times b [N.., K, M] -> [N.., R, M]."""
    return a @ b


bmm = Operator(bmm_reference, describe_bmm)
"""In C++ where it fits, without gradients."""

__all__ = ["MAX_ROWS", "bmm", "bmm_library", "bmm_reference", "describe_bmm"]
