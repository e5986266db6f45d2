"""`semkv::linear`: a projection whose weight is read once, at the speed at which it can be read, where tokens are few."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from semkv.ir import ops
from semkv.kernels.calls import OPERATORS, Operator
from semkv.kernels.cpp import compiler
from semkv.kernels.linear.cpp import FEW_TOKENS, describe_linear, linear_cpp, linear_library
from semkv.kernels.registration import register

SMALL_WEIGHT = 1 << 14
"""Numbers of a weight below which a call takes longer than reading it."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], plus bias [N] -> [..., N].

    For few tokens in float32 on a CPU with a compiler by the kernel in C++, which reads a weight once, as several streams.
    Everything else is PyTorch's `linear`.
    """
    return linear_cpp(x, weight, bias) if _waits_for_weight(x, weight, bias) else F.linear(x, weight, bias)


def _waits_for_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether reading the weight decides the time, and the kernel in C++ can."""
    given = [y for y in (x, weight, bias) if y is not None]
    if weight.numel() < SMALL_WEIGHT or not weight.is_contiguous() or compiler() is None:
        return False
    if any(y.device.type != "cpu" or y.dtype != torch.float32 for y in given):
        return False
    tokens = x.numel() // weight.shape[1]
    graph = torch.is_grad_enabled() and any(y.requires_grad for y in given)
    return 0 < tokens <= FEW_TOKENS and not graph and linear_library(tokens).failure() is None


register(ops.library, "linear", linear, differentiable=(0, 1, 2))
OPERATORS[ops.linear] = Operator(linear, describe_linear)

__all__ = ["linear"]
