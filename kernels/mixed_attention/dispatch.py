"""Which form answers a call of `semkv::mixed_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.kernels.cpp import MISSING, compiler
from semkv.kernels.mixed_attention.blocked import attend_blocked
from semkv.kernels.mixed_attention.blocks import each
from semkv.kernels.mixed_attention.call import DTYPES, AttentionCall
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.cpp import MAX_DIM, MAX_ROWS, attend_cpp, attention_library

KERNELS = ("auto", "torch", "cpp", "triton")


def mixed_attention(*arguments: Any, kernel: str = "auto", layout: Sequence[int] = (), **keywords: Any) -> Tensor:
    """What `mixed_attention_reference` computes, by a kernel where `refusal` has no reason against it, else in PyTorch.

    layout: the fields of a `Configuration` of Triton's kernel, in its order; none: its defaults.

    Raises
    ------
    ConfigError: an unknown `kernel`, or one that was asked for by name and cannot run.
    """
    call = AttentionCall.of(*arguments, **keywords)
    if refusal(call, kernel) is not None:
        return attend_blocked(call)
    if form_of(kernel, call.q.device)[0] == "cpp":
        return attend_cpp(call)
    from semkv.kernels.mixed_attention.triton import attend_triton

    return attend_triton(call, configuration=Configuration(*layout))


def refusal(call: AttentionCall, kernel: str = "auto") -> str | None:
    """Why PyTorch answers this call of the operator; None where the kernel of `form_of` does. It is made for calls of few queries.

    Raises
    ------
    ConfigError: an unknown `kernel`, or one that was asked for by name and cannot run.
    """
    q, own = call.q, call.entries
    form, reason = form_of(kernel, q.device)
    if form == "torch":
        return reason
    if call.fresh:
        return "a prompt attends to its own tokens"
    group = q.shape[1] // call.kv_heads
    if group * q.shape[2] > MAX_ROWS:
        return f"{q.shape[2]} queries for each of {group} heads of a group; the kernel takes {MAX_ROWS} rows"
    stored = [
        *zip(own.block_k, each(own.block_k_scale, len(own.block_k))),
        *zip(own.block_v, each(own.block_v_scale, len(own.block_v))),
    ]
    others = [x.dtype for x, scale in stored if scale is None and x.dtype not in DTYPES]
    if q.dtype not in DTYPES or others:
        kept = others[0] if others else own.block_k[0].dtype
        return f"queries are {q.dtype} and entries {kept}; the kernel takes float16, bfloat16, float32 and codes"
    dims = q.shape[3], call.value_dim
    if max(dims) > MAX_DIM:
        return f"head dims are {dims[0]} and {dims[1]}; the kernel takes up to {MAX_DIM}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors()):
        return "gradients flow through it"
    if form == "triton":
        return None
    if own.key_u is not None:
        return "factored spans are attended to in matrix products"
    return attention_library(*dims, group).failure(asked=kernel == "cpp")


def form_of(kernel: str, device: torch.device) -> tuple[str, str]:
    """What answers calls on `device`, `torch`, `cpp` or `triton`, and for `torch` why.

    Raises
    ------
    ConfigError: an unknown `kernel`, or one that was asked for by name and cannot run.
    """
    if kernel not in KERNELS:
        raise ConfigError(f"kernels {kernel!r}: expected one of {', '.join(KERNELS)}")
    if kernel == "torch":
        return "torch", "PyTorch was asked for"
    if kernel == "triton" or (kernel == "auto" and device.type == "cuda"):
        return _triton(kernel, device)
    if device.type != "cpu":
        if kernel == "cpp":
            raise ConfigError(f"kernels 'cpp' on {device.type}: it is for CPUs; use 'auto'")
        return "torch", f"the device is {device.type}"
    if compiler() is None:
        if kernel == "cpp":
            raise ConfigError(f"kernels 'cpp': {MISSING}; install one, or use 'auto'")
        return "torch", MISSING
    return "cpp", ""


def _triton(kernel: str, device: torch.device) -> tuple[str, str]:
    if find_spec("triton") is None:
        if kernel == "triton":
            raise ConfigError("kernels 'triton': the package triton is not installed; install it, or use 'auto'")
        return "torch", "the package triton is not installed"
    if device.type == "cuda":
        return "triton", ""
    import triton

    if not triton.knobs.runtime.interpret:
        raise ConfigError(
            f"kernels 'triton' on {device.type}: it compiles for CUDA; use 'auto', or start Python with TRITON_INTERPRET=1, "
            "which runs kernels on a CPU, slowly"
        )
    return "triton", ""
