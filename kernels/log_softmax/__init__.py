"""Scores of units as log-probabilities, so that query heads of a group can be compared."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.kernels.cpp import compiler
from semkv.kernels.log_softmax.cpp import log_softmax_cpp, log_softmax_library


def log_softmax(x: Tensor) -> Tensor:
    """`torch.log_softmax` over the last dim of x [..., M], whose numbers may be overwritten: in C++ for float32 on a CPU, where there is a
    compiler."""
    if (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
        and not x.requires_grad
        and compiler() is not None
        and log_softmax_library().failure() is None
    ):
        return log_softmax_cpp(x)
    return x.log_softmax(-1)


__all__ = ["log_softmax"]
