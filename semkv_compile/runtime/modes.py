"""Which mode of autograd the memory is made and changed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without gradients, and with ordinary tensors where its caller is in `torch.inference_mode`: what it makes outlives that
    mode, and inference tensors could not be changed outside of it."""
    return torch.inference_mode(False)(torch.no_grad()(function))


__all__ = ["without_grad"]
