"""`semkv::append_` on the device: one launch, a program for each token of a KV head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from semkv.kernels.calls import UnsupportedCall
from semkv.kernels.generation import Launch, padded
from semkv.kernels.state.numbers import FLOATS
from semkv.kernels.state.triton.arguments import demand, demand_counts, strides

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: what is added and taken away again rounds numbers below 2^22 to whole ones, halves to even ones."""


@triton.jit
def _levels(x, scale, BITS: tl.constexpr):
    """Codes int32 of numbers float32 by their scale, the middle one is 0's."""
    top: tl.constexpr = 2 ** (BITS - 1) - 1
    x = tl.minimum(tl.maximum(tl.div_rn(x, scale), -top - 1.0), top + 1.0)  # what rounds beyond the ends stays there
    x = tl.minimum(tl.maximum((x + ROUND) - ROUND, -top * 1.0), top * 1.0)
    return (x + (top + 1.0)).to(tl.int32)


@triton.jit
def _put(p_new, p_into, p_scale, DIM: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A vector as numbers of the dtype of its place (BITS 0), or as codes and their scale."""
    if BITS == 0:
        o_dim = tl.arange(0, BLOCK)
        x = tl.load(p_new + o_dim, mask=o_dim < DIM, other=0.0)
        tl.store(p_into + o_dim, x.to(p_into.dtype.element_ty), mask=o_dim < DIM)
    else:
        each: tl.constexpr = 8 // BITS
        bytes_: tl.constexpr = (DIM + each - 1) // each
        o_byte = tl.arange(0, BLOCK)
        first = tl.load(p_new + each * o_byte, mask=each * o_byte < DIM, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(first), 0)
        none = tl.max((first != first).to(tl.int32), 0)
        if BITS == 4:
            second = tl.load(p_new + 2 * o_byte + 1, mask=2 * o_byte + 1 < DIM, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(second), 0))
            none = tl.maximum(none, tl.max((second != second).to(tl.int32), 0))
        scale = tl.div_rn(largest, 2.0 ** (BITS - 1) - 1.0)
        scale = tl.minimum(tl.maximum(scale, 2.0**-24), 65504.0)  # the ends of float16
        scale = tl.where(none > 0, float("nan"), scale).to(tl.float16)
        codes = _levels(first, scale.to(tl.float32), BITS)
        if BITS == 4:
            codes += 16 * _levels(second, scale.to(tl.float32), BITS)
        tl.store(p_into + o_byte, codes.to(tl.uint8), mask=o_byte < bytes_)
        tl.store(p_scale, scale)


@triton.jit
def append_tokens(
    p_k,
    p_v,
    p_positions,
    p_k_scale,
    p_v_scale,
    p_new_k,
    p_new_v,
    p_new_positions,
    p_at,
    heads,
    window,
    k_0,
    k_1,
    k_2,
    v_0,
    v_1,
    v_2,
    positions_0,
    k_scale_0,
    k_scale_1,
    k_scale_2,
    v_scale_0,
    v_scale_1,
    v_scale_2,
    new_k_0,
    new_k_1,
    new_k_2,
    new_v_0,
    new_v_1,
    new_v_2,
    new_positions_0,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Grid (B * Hkv, T): the operator's tensors, by their strides; the last numbers of each lie together."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1)
    place = (tl.load(p_at + row) + token) % window
    p_k_scale += row * k_scale_0 + head * k_scale_1 + place * k_scale_2
    p_v_scale += row * v_scale_0 + head * v_scale_1 + place * v_scale_2
    new_k, new_v = p_new_k + row * new_k_0 + head * new_k_1, p_new_v + row * new_v_0 + head * new_v_1
    into_k, into_v = p_k + row * k_0 + head * k_1 + place * k_2, p_v + row * v_0 + head * v_1 + place * v_2
    _put(new_k + token * new_k_2, into_k, p_k_scale, DIM, K_BITS, BLOCK)
    _put(new_v + token * new_v_2, into_v, p_v_scale, VALUE_DIM, V_BITS, VALUE_BLOCK)
    if head == 0:
        position = tl.load(p_new_positions + row * new_positions_0 + token)
        tl.store(p_positions + row * positions_0 + place, position.to(tl.int32))


def append_launches(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    new_positions: Tensor,
    at: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[None, list[Launch]]:
    """`semkv::append_`."""
    bits = []
    for name, into, scale, new in (("k", k, k_scale, new_k), ("v", v, v_scale, new_v)):
        demand(f"new_{name}", new, FLOATS)
        demand(name, into, FLOATS if scale is None else None)
        held, dim = into.shape[-1], new.shape[-1]
        bits.append(0 if scale is None else 8 if held == dim else 4)
        if bits[-1] == 4 and held != -(-dim // 2):
            raise UnsupportedCall(f"{name} has {held} bytes of {dim} numbers; expected codes of 4 or 8 bits")
    demand_counts(new_positions=new_positions, at=at)
    rows, heads, tokens, dim = new_k.shape
    window, value_dim = k.shape[2], new_v.shape[-1]
    if not rows * heads * tokens * window:
        return None, []
    given = {
        "k": (k, 3),
        "v": (v, 3),
        "positions": (positions, 1),
        "k_scale": (k if k_scale is None else k_scale, 3),
        "v_scale": (v if v_scale is None else v_scale, 3),
        "new_k": (new_k, 3),
        "new_v": (new_v, 3),
        "new_positions": (new_positions, 1),
    }
    arguments: dict[str, Tensor | float | None] = {f"p_{name}": x for name, (x, _) in given.items()}
    arguments |= {"p_at": at, "heads": heads, "window": window}
    for name, (x, count) in given.items():
        arguments |= strides(name, x, count)
    sizes = [-(-size * width // 8) if width else size for size, width in zip((dim, value_dim), bits)]
    constants = {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "K_BITS": bits[0],
        "V_BITS": bits[1],
        "BLOCK": padded(sizes[0]),
        "VALUE_BLOCK": padded(sizes[1]),
    }
    return None, [Launch(append_tokens, (rows * heads, tokens), arguments, constants, 1, 1)]


__all__ = ["append_launches"]
