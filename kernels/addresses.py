"""Addresses of tensors for kernels in C++, which see no dtype, device or size: all of that is looked at here, before they read or write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.errors import InputError


def address_of(name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], *, dense: bool = True) -> int:
    """Where the numbers of x begin in the memory of the CPU.

    name: for the message. dtype, shape: what the kernel takes for granted. dense: whether it also takes the numbers to lie one after the
    other; else it is told the strides.

    Raises
    ------
    InputError: x is another tensor than the kernel would take it for.
    """
    if x.dtype is dtype and x.is_cpu and x.shape == shape and (not dense or x.is_contiguous()):
        return x.data_ptr()
    layout = "" if x.is_contiguous() else f" with strides {x.stride()}"
    wanted = " contiguous" if dense else ""
    raise InputError(
        f"a kernel in C++ was given {name} {x.dtype} {tuple(x.shape)} on {x.device}{layout}; expected{wanted} {dtype} {tuple(shape)} "
        "on cpu: call the operation of `semkv.kernels`, which chooses a kernel by its inputs"
    )


__all__ = ["address_of"]
