"""Gather of waiting tokens on the device: what is launched for given tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.gather.template import gather_rows
from semkv.kernels.generation import Launch, padded

BLOCK = 32
"""Tokens per program: few, so that many programs keep the link busy."""


def gather_tokens_launches(
    waiting: Tensor, index: Tensor, scale: Tensor | None = None, *, dtype: torch.dtype
) -> tuple[Tensor, list[Launch]]:
    """The result of `gather_tokens_reference` on the device of `index`, and the launch that writes it.

    waiting and scale are contiguous, on the same device or in pinned memory of the host: they are not copied.
    """
    if not waiting.is_contiguous() or (scale is not None and not scale.is_contiguous()):
        raise InputError("what waits is not contiguous; expected the whole pool, whose copy would defeat the purpose")
    if (waiting.dtype == torch.uint8) != (scale is not None):
        raise InputError(
            f"waiting is {waiting.dtype} {'with' if scale is not None else 'without'} scales; codes uint8 have some"
        )
    if waiting.device.type == "cpu" and index.device.type == "cuda" and not waiting.is_pinned():
        raise InputError(
            "waiting is in pageable memory of the host; a GPU reads it where it is pinned: waiting.pin_memory()"
        )
    (heads, count), (_, capacity, dim) = index.shape, waiting.shape
    out = torch.empty((heads, count, dim), dtype=dtype, device=index.device)
    arguments: dict[str, Tensor | float | None] = {
        "p_waiting": waiting, "p_scale": scale, "p_index": index.contiguous(), "p_out": out,
        "capacity": capacity, "count": count,
    }  # fmt: skip
    constants = {"DIM": dim, "QUANTISED": int(scale is not None), "BLOCK": BLOCK, "BLOCK_DIM": padded(dim)}
    return out, [Launch(gather_rows, (heads, -(-count // BLOCK)), arguments, constants, 4, 1)]


def gather_tokens_triton(waiting: Tensor, index: Tensor, scale: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """What `gather_tokens_reference` gathers, on the device of `index`."""
    out, launches = gather_tokens_launches(waiting, index, scale, dtype=dtype)
    for launch in launches:
        launch.run()
    return out
