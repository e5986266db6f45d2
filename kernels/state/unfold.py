"""`semkv::unfold_` in C++ on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv.kernels.calls import Call, Made, Operand, UnsupportedCall, call, demand, strides_of
from semkv.kernels.cpp import Library, library
from semkv.kernels.state.numbers import CODES, FLOATS, KINDS, NUMBERS, SCALES

TEMPLATE = Path(__file__).parent / "unfold.cpp"


class _Side(ctypes.Structure):
    """`Side` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("stored", "scale", "into", "into_scale")),
        *((name, ctypes.c_int64) for name in ("width", "stored_kind", "into_kind")),
        *(
            (name, ctypes.c_int64 * 3)
            for name in ("stored_strides", "scale_strides", "into_strides", "into_scale_strides")
        ),
    )


class _Call(ctypes.Structure):
    """`Call` of the template."""

    _fields_ = (
        ("sides", _Side * 2),
        *((name, ctypes.c_int64) for name in ("positions", "slots", "chosen", "start", "shift", "bounds", "order")),
        *((name, ctypes.c_int64) for name in ("where", "out", "marks", "places", "into", "counts")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "capacity", "units", "waiting", "length", "in_file")),
        *((f"{name}_strides", ctypes.c_int64 * 2) for name in ("positions", "slots", "chosen", "bounds", "order")),
        *((name, ctypes.c_int64) for name in ("where_stride", "threads", "parallel")),
    )


@cache
def unfold_library() -> Library:
    """The object, one for all sizes and dtypes."""
    return library(TEMPLATE, {}, [NUMBERS])


def waits_in_file(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """The setting of `describe_unfold` for an operator's arguments: pages of a file are asked for before the first is read."""
    return {"in_file": any(arguments[name].untyped_storage().filename is not None for name in ("host_k", "host_v"))}


def describe_unfold(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    chosen: Tensor,
    host_k: Tensor,
    host_v: Tensor,
    start: Tensor,
    shift: Tensor,
    length: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    host_k_scale: Tensor | None = None,
    host_v_scale: Tensor | None = None,
    bounds: Tensor | None = None,
    order: Tensor | None = None,
    where: Tensor | None = None,
    *,
    in_file: bool = False,
) -> Call:
    """`unfold_` of numbers of 32 or 16 bits, or codes; the numbers of each vector lie one after the other. Raises `UnsupportedCall`.

    in_file: whether what waits does so in a file, mapped into memory.
    """
    rows, heads, capacity = slots.shape
    units, waiting = chosen.shape[2], host_k.shape[2]
    if max(waiting, capacity) > torch.iinfo(torch.int32).max:
        raise UnsupportedCall(f"{waiting} places for {capacity} slots; expected what an int32 numbers")
    if order is not None and bounds is None:
        raise UnsupportedCall("an order without bounds; expected both")
    tensors = {"positions": positions, "slots": slots, "chosen": chosen, "start": start, "shift": shift}
    tensors |= {"bounds": bounds, "order": order, "where": where}
    for name in ("positions", "slots"):
        demand(name, tensors[name], [torch.int32], (rows, heads, capacity))
    for name in ("start", "shift"):
        demand(name, tensors[name], [torch.int64], (rows,), dense=True)
    demand("chosen", chosen, [torch.bool], (rows, heads, units))
    for name, size in (("bounds", units + 1), ("order", waiting)):
        x = tensors[name]
        if x is not None:
            demand(name, x, [torch.int32], (rows, heads if x.shape[1] == heads else 1, size))
    if where is not None:
        demand("where", where, [torch.int32], (rows, waiting))
    words = -(-waiting // 64)
    fields: dict[str, Operand | float | None] = {
        **{name: Operand("argument", name) for name, x in tensors.items() if x is not None},
        "out": Operand("output", 0),
        **{name: Operand("scratch", place) for place, name in enumerate(("marks", "places", "into", "counts"))},
        "rows": rows,
        "heads": heads,
        "capacity": capacity,
        "units": units,
        "waiting": waiting,
        "length": length,
        "in_file": in_file,
        "where_stride": 0 if where is None or rows == 1 else where.stride(0) * where.itemsize,
    }
    for name in ("positions", "slots", "chosen", "bounds", "order"):
        fields |= strides_of(f"{name}_strides", tensors[name], 2)
    sides = (("k", k, k_scale, host_k, host_k_scale), ("v", v, v_scale, host_v, host_v_scale))
    for place, (name, *side) in enumerate(sides):
        fields |= {f"sides.{place}.{field}": value for field, value in _side(name, rows, heads, *side).items()}
        tensors |= dict(zip((name, f"{name}_scale", f"host_{name}", f"host_{name}_scale"), side))
    written = ("k", "v", "positions", "slots", "k_scale", "v_scale")
    return call(
        unfold_library(),
        "unfold_units",
        _Call,
        fields,
        tensors,
        outputs=[Made((rows, 2), torch.int64)],
        scratch=[rows * heads * size for size in (words * 8, capacity * 4, capacity * 4, 16)],
        written=[name for name in written if tensors[name] is not None],
    )


def _side(
    name: str, rows: int, heads: int, into: Tensor, scale: Tensor | None, host: Tensor, host_scale: Tensor | None
) -> dict[str, Operand | float | None]:
    """Fields of a `Side`: keys or values."""
    capacity, width, waiting = into.shape[2], into.shape[3], host.shape[2]
    stored = CODES if host_scale is not None else (into.dtype,)
    demand(name, into, FLOATS if scale is None else CODES, (rows, heads, capacity, width))
    demand(f"host_{name}", host, stored, (rows, heads, waiting, width))
    if host_scale is None and scale is not None:
        raise UnsupportedCall(f"{name} waits without scales for slots that have some")
    for kind, x, count in ((f"{name}_scale", scale, capacity), (f"host_{name}_scale", host_scale, waiting)):
        if x is not None:
            demand(kind, x, SCALES, (rows, heads, count, 1))
    return {
        "stored": Operand("argument", f"host_{name}"),
        "scale": None if host_scale is None else Operand("argument", f"host_{name}_scale"),
        "into": Operand("argument", name),
        "into_scale": None if scale is None else Operand("argument", f"{name}_scale"),
        "width": width,
        "stored_kind": KINDS[host.dtype],
        "into_kind": KINDS[into.dtype],
        **strides_of("stored_strides", host, 3),
        **strides_of("scale_strides", host_scale, 3),
        **strides_of("into_strides", into, 3),
        **strides_of("into_scale_strides", scale, 3),
    }


__all__ = ["describe_unfold", "unfold_library", "waits_in_file"]
