"""`semkv::products` and `semkv::look_up` on the device: one launch each, tiles of vectors in parallel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semkv.kernels.calls import UnsupportedCall
from semkv.kernels.generation import Launch, padded
from semkv.kernels.state.numbers import CODES, FLOATS, SCALES
from semkv.kernels.state.triton.arguments import demand, strides

MAX_ROWS = 16
"""Rows of queries per program: the products are of float32, and a wider tile would spill."""
UNITS = 64
"""Vectors per program."""
CHUNK = 32
"""Numbers of a vector at a time, for the same reason."""


@triton.jit
def _tile(p_x, o_dim, o_unit, inside, x_2, BITS: tl.constexpr):
    """Numbers float32 [CHUNK, BLOCK] of vectors, or codes less the middle one."""
    if BITS == 16:
        return tl.load(p_x + o_unit[None, :] * x_2 + o_dim[:, None], mask=inside, other=0.0).to(tl.float32)
    else:
        each: tl.constexpr = 8 // BITS
        codes = tl.load(p_x + o_unit[None, :] * x_2 + (o_dim // each)[:, None], mask=inside, other=0).to(tl.int32)
        codes = (codes >> (BITS * (o_dim % each))[:, None]) & ((1 << BITS) - 1)
        return (codes - (1 << (BITS - 1))).to(tl.float32)


@triton.jit
def products_of_rows(
    p_q,
    p_x,
    p_scale,
    p_y,
    p_y_scale,
    p_out,
    heads,
    rows,
    units,
    alpha,
    q_0,
    q_1,
    q_2,
    x_0,
    x_1,
    x_2,
    scale_0,
    scale_1,
    scale_2,
    y_0,
    y_1,
    y_2,
    y_scale_0,
    y_scale_1,
    y_scale_2,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (B * H, blocks of rows, blocks of units): out float32 [B, H, R, M] of alpha * q with x; with SIDES, of its positive numbers
    with x and of its negative ones with y."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_unit = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, there = o_row < rows, o_unit < units
    p_q += batch * q_0 + head * q_1
    p_x += batch * x_0 + head * x_1
    p_y += batch * y_0 + head * y_1
    found = tl.zeros([ROWS, BLOCK], tl.float32)
    other = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, DIM, CHUNK):
        o_dim = first + tl.arange(0, CHUNK)
        in_dim = o_dim < DIM
        inside = in_dim[:, None] & there[None, :]
        query = tl.load(p_q + o_row[:, None] * q_2 + o_dim[None, :], mask=live[:, None] & in_dim[None, :], other=0.0)
        query = query.to(tl.float32) * alpha
        x = _tile(p_x, o_dim, o_unit, inside, x_2, BITS)
        if SIDES:
            found = tl.dot(tl.maximum(query, 0.0), x, found, input_precision="ieee")
            y = _tile(p_y, o_dim, o_unit, inside, y_2, BITS)
            other = tl.dot(tl.minimum(query, 0.0), y, other, input_precision="ieee")
        else:
            found = tl.dot(query, x, found, input_precision="ieee")
    if BITS < 16:
        p_scale += batch * scale_0 + head * scale_1
        found *= tl.load(p_scale + o_unit * scale_2, mask=there, other=0.0).to(tl.float32)[None, :]
        if SIDES:
            p_y_scale += batch * y_scale_0 + head * y_scale_1
            other *= tl.load(p_y_scale + o_unit * y_scale_2, mask=there, other=0.0).to(tl.float32)[None, :]
    at = (tl.program_id(0).to(tl.int64) * rows + o_row)[:, None] * units + o_unit[None, :]
    tl.store(p_out + at, found + other if SIDES else found, mask=live[:, None] & there[None, :])


def products_launches(
    q: Tensor,
    x: Tensor,
    scale: Tensor | None = None,
    bits: int = 16,
    *,
    alpha: float = 1.0,
    y: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> tuple[Tensor, list[Launch]]:
    """`semkv::products` of alpha * q. With y, which is as x is: what its numbers above 0 give with x, and those below with y (Quest's
    bound of a page)."""
    rows, heads, queries, dim = q.shape
    units = x.shape[2]
    demand("q", q, FLOATS)
    if bits not in (4, 8, 16) or (bits < 16) != (scale is not None):
        raise UnsupportedCall(f"bits is {bits}; expected 16, or 4 or 8 with scales")
    sides = [(x, scale)] if y is None else [(x, scale), (y, y_scale)]
    for vectors, by in sides:
        demand("x", vectors, FLOATS if bits == 16 else CODES)
        if vectors.shape != (rows, heads, units, -(-dim * min(bits, 8) // 8) if bits < 16 else dim):
            raise UnsupportedCall(
                f"x is {tuple(vectors.shape)}; expected vectors of {dim} numbers of each of {heads} heads"
            )
        if by is not None:
            demand("scale", by, (*SCALES, torch.float32))
            if by.shape != (rows, heads, units, 1):
                raise UnsupportedCall(f"scale is {tuple(by.shape)}; expected one of each vector")
    out = q.new_empty((rows, heads, queries, units), dtype=torch.float32)
    if not out.numel():
        return out, []
    given = {
        "q": q,
        "x": x,
        "scale": x if scale is None else scale,
        "y": x if y is None else y,
        "y_scale": x if y_scale is None else y_scale,
    }
    arguments: dict[str, Tensor | float | None] = {f"p_{name}": tensor for name, tensor in given.items()}
    arguments |= {"p_out": out, "heads": heads, "rows": queries, "units": units, "alpha": float(alpha)}
    for name, tensor in given.items():
        arguments |= strides(name, tensor, 3)
    tile = min(MAX_ROWS, padded(queries))
    constants = {
        "DIM": dim,
        "BITS": bits,
        "SIDES": int(y is not None),
        "ROWS": tile,
        "BLOCK": UNITS,
        "CHUNK": CHUNK,
    }
    grid = (rows * heads, -(-queries // tile), -(-units // UNITS))
    return out, [Launch(products_of_rows, grid, arguments, constants, 4, 1)]


@triton.jit
def look_up_codes(
    p_tables,
    p_codes,
    p_out,
    heads,
    rows,
    units,
    codes_0,
    codes_1,
    codes_2,
    STAGES: tl.constexpr,
    VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * H, blocks of rows, blocks of units): tables float32 [B, H, R, STAGES, VECTORS] -> out float32 [B, H, R, M]."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_unit = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = o_unit < units
    both = (o_row < rows)[:, None] & there[None, :]
    row = tl.program_id(0).to(tl.int64) * rows + o_row
    p_codes += batch * codes_0 + head * codes_1 + o_unit * codes_2
    p_row = p_tables + row[:, None] * (STAGES * VECTORS)
    found = tl.zeros([ROWS, BLOCK], tl.float32)
    for stage in tl.static_range(STAGES):
        code = tl.load(p_codes + stage, mask=there, other=0).to(tl.int32)
        found += tl.load(p_row + stage * VECTORS + code[None, :], mask=both, other=0.0)
    tl.store(p_out + row[:, None] * units + o_unit[None, :], found, mask=both)


def look_up_launches(tables: Tensor, codes: Tensor) -> tuple[Tensor, list[Launch]]:
    """`semkv::look_up`."""
    rows, heads, queries, stages, vectors = tables.shape
    units = codes.shape[2]
    demand("codes", codes, CODES)
    if tables.dtype != torch.float32 or not tables.is_contiguous() or codes.shape != (rows, heads, units, stages):
        raise UnsupportedCall(
            f"tables {tables.dtype} {tuple(tables.shape)} and codes {tuple(codes.shape)}; expected float32 tables without gaps, and "
            "a code of each stage"
        )
    out = tables.new_empty((rows, heads, queries, units))
    if not out.numel():
        return out, []
    arguments: dict[str, Tensor | float | None] = {"p_tables": tables, "p_codes": codes, "p_out": out}
    arguments |= {"heads": heads, "rows": queries, "units": units, **strides("codes", codes, 3)}
    tile = min(MAX_ROWS, triton.next_power_of_2(queries))
    constants = {"STAGES": stages, "VECTORS": vectors, "ROWS": tile, "BLOCK": UNITS}
    grid = (rows * heads, -(-queries // tile), -(-units // UNITS))
    return out, [Launch(look_up_codes, grid, arguments, constants, 4, 1)]


__all__ = ["look_up_launches", "products_launches"]
