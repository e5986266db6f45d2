"""Run in the process of Triton's interpreter, which in bfloat16 truncates where a GPU rounds and multiplies bits as integers (3.9)."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

create_dot, cast_impl = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def widened(x: TensorHandle) -> TensorHandle:
    """bfloat16 as the float32 that it is the upper half of: products and sums are those of a tensor core."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def cast(self: InterpreterBuilder, x: TensorHandle, kind: tl.dtype) -> TensorHandle:
    """float32 to bfloat16 by rounding to the nearest, ties to even."""
    if x.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
        return cast_impl(self, x, kind)
    bits = np.ascontiguousarray(x.data).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(x.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


InterpreterBuilder.create_dot = lambda self, a, b, d, *rest: create_dot(self, widened(a), widened(b), d, *rest)
InterpreterBuilder.cast_impl = cast
