"""Which form answers a call of `semkv::mixed_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.kernels.mixed_attention.blocked import mixed_attention_blocked
from semkv.kernels.mixed_attention.blocks import kv_heads_of
from semkv.kernels.mixed_attention.configuration import Configuration

KERNELS = ("auto", "torch", "triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_DIM = 256
MAX_ROWS = 64
"""Query rows per KV head that one tile has: with more, the kernel would read keys and values more than once."""


def mixed_attention(*arguments: Any, kernel: str = "auto", layout: Sequence[int] = (), **keywords: Any) -> Tensor:
    """What `mixed_attention_reference` computes, by Triton's kernel where `refusal` has no reason against it, else in PyTorch.

    layout: the fields of a `Configuration`, in its order; none: its defaults.

    Raises
    ------
    ConfigError: an unknown `kernel`, or `triton` where it cannot run.
    """
    if refusal(*arguments, kernel=kernel, **keywords) is not None:
        return mixed_attention_blocked(*arguments, **keywords)
    from semkv.kernels.mixed_attention.triton import mixed_attention_triton

    return mixed_attention_triton(*arguments, configuration=Configuration(*layout), **keywords)


def refusal(*arguments: Any, kernel: str = "auto", fresh: bool = False, **keywords: Any) -> str | None:
    """Why Triton's kernel does not answer this call of the operator; None where it does.

    kernel: `torch`: never; `auto`: on CUDA; `triton`: also on a CPU, in Triton's interpreter. It is made for calls of few queries.
    """
    q, exact_k, exact_v = arguments[0], arguments[2], arguments[3]
    if (reason := unusable(kernel, q.device)) is not None:
        return reason
    if fresh:
        return "a prompt attends to its own tokens"
    group = q.shape[1] // kv_heads_of(q.shape[0], q.shape[1], exact_k, arguments[6] if len(arguments) > 6 else None)
    if group * q.shape[2] > MAX_ROWS:
        return f"{q.shape[2]} queries for each of {group} heads of a group; the kernel takes {MAX_ROWS} rows"
    if q.dtype not in DTYPES or exact_k[0].dtype not in DTYPES:
        return f"queries are {q.dtype} and keys {exact_k[0].dtype}; the kernel takes float16, bfloat16 and float32"
    if max(q.shape[3], exact_v[0].shape[3]) > MAX_DIM:
        return f"head dims are {q.shape[3]} and {exact_v[0].shape[3]}; the kernel takes up to {MAX_DIM}"
    tensors = [x for value in (*arguments, *keywords.values()) for x in (value if isinstance(value, list) else [value])]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        return "gradients flow through it"
    return None


def unusable(kernel: str, device: torch.device) -> str | None:
    """Why no call on `device` is answered by Triton; None where calls may be.

    Raises
    ------
    ConfigError: an unknown `kernel`, or `triton` where it cannot run.
    """
    if kernel not in KERNELS:
        raise ConfigError(f"kernels {kernel!r}: expected one of {', '.join(KERNELS)}")
    if kernel == "torch":
        return "PyTorch was asked for"
    if find_spec("triton") is None:
        if kernel == "triton":
            raise ConfigError("kernels 'triton': the package triton is not installed; install it, or use 'auto'")
        return "the package triton is not installed"
    if device.type == "cuda":
        return None
    if kernel == "auto":
        return f"the device is {device.type}"
    import triton

    if not triton.knobs.runtime.interpret:
        raise ConfigError(
            f"kernels 'triton' on {device.type}: it compiles for CUDA; use 'auto', or start Python with TRITON_INTERPRET=1, "
            "which runs kernels on a CPU, slowly"
        )
    return None
