"""Page-locked memory of the host as tensors of a GPU, which reads it through the link at its own address."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS = {1: ("|u1", torch.uint8), 2: ("<i2", torch.int16), 4: ("<i4", torch.int32), 8: ("<i8", torch.int64)}
"""Whole numbers by their bytes."""


class _Addressed:
    """What a GPU is told of `x`, by NumBa's interface for arrays on CUDA devices, in whole numbers of the same size: it has no bfloat16."""

    def __init__(self, x: Tensor) -> None:
        self.x = x  # stays as long as what reads it

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        x = self.x
        kind = KINDS[x.element_size()][0]
        return {"shape": tuple(x.shape), "typestr": kind, "data": (x.data_ptr(), False), "strides": None, "version": 3}


def mapped(x: Tensor, device: torch.device) -> Tensor:
    """`x`, dense and in page-locked memory, as a tensor on `device`: what is written to the one is read in the other.

    The host writes only while nothing on the device reads: a step ends before it does.
    """
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    there: Tensor = torch.as_tensor(_Addressed(x), dtype=KINDS[x.element_size()][1], device=device)
    return there.view(x.dtype)


__all__ = ["mapped"]
