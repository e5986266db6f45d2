"""In which modes of PyTorch the package works: its own, whatever those of its caller are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

HOST = torch.device("cpu")
AUTOCAST = ("cpu", "cuda")
"""Devices whose autocast would cast what the package computes."""


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """`function` in modes of its own: without gradients, without autocast, with the CPU as the default device, and with ordinary tensors
    where its caller is in `torch.inference_mode`: what it makes outlives that mode, and inference tensors could not be changed outside
    of it. Where the caller is under `torch.compile`, it runs as it is: it has graphs of its own.

    All of these belong to the calling thread and are as before when it returns. The default dtype belongs to all threads, so that it
    cannot be set here: tensors say theirs.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        casting = [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]
        elsewhere = torch.get_default_device() != HOST
        if not (casting or elsewhere or torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            return function(*args, **kwargs)  # as every call inside of another one is
        with torch.inference_mode(False), torch.no_grad():
            if not (casting or elsewhere):
                return function(*args, **kwargs)
            with ExitStack() as modes:
                for kind in casting:
                    modes.enter_context(torch.autocast(kind, enabled=False))
                modes.enter_context(HOST)
                return function(*args, **kwargs)

    return torch.compiler.disable(run)


__all__ = ["undisturbed"]
