"""Waiting tokens to the slots of a workspace on the device: what is launched for given tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.gather.template import copy_rows
from semkv.kernels.generation import Launch, padded

BLOCK = 32
"""Tokens per program: few, so that many programs keep the link busy."""


def copy_tokens_launches(
    waiting: Sequence[Tensor], scales: Sequence[Tensor | None], into: Sequence[Tensor], tokens: Tensor
) -> list[Launch]:
    """What does `copy_tokens_reference`, one launch for keys and one for values; tokens int64 [3, n], on the device of `into`: heads,
    places and rows.

    What waits is contiguous, on that device or in pinned memory of the host.
    """
    launches = []
    for x, scale, out in zip(waiting, scales, into):
        if not all(y is None or y.is_contiguous() for y in (x, scale, out)):
            raise InputError("what waits, or where it goes, is not contiguous; expected the whole pool and all slots")
        stays = (x.dtype == torch.uint8) == (out.dtype == torch.uint8)
        if not (stays if scale is None else x.dtype == torch.uint8):
            raise InputError(
                f"waiting is {x.dtype} {'with' if scale is not None else 'without'} scales, its place {out.dtype}; codes uint8 become "
                "numbers by scales, or stay codes"
            )
        if out.is_cuda and any(y is not None and not y.is_cuda and not y.is_pinned() for y in (x, scale)):
            raise InputError(
                "waiting is in pageable memory of the host; a GPU reads it where it is pinned: waiting.pin_memory()"
            )
        (_, capacity, dim), count = x.shape, tokens.shape[1]
        arguments: dict[str, Tensor | float | None] = {
            "p_tokens": tokens,
            "p_waiting": x,
            "p_scale": scale,
            "p_into": out,
            "capacity": capacity,
            "count": count,
        }
        constants = {"DIM": dim, "QUANTISED": int(scale is not None), "BLOCK": BLOCK, "BLOCK_DIM": padded(dim)}
        launches.append(Launch(copy_rows, (-(-count // BLOCK),), arguments, constants, 4, 1))
    return launches


def copy_tokens_triton(
    waiting: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    into: Sequence[Tensor],
    heads: Tensor,
    places: Tensor,
    at: Tensor,
) -> Sequence[Tensor]:
    """`copy_tokens_reference` on the device of `into`, which is returned. Nothing waits for the device."""
    if not len(at):
        return into
    tokens, device = torch.stack([heads, places, at]), into[0].device
    if into[0].is_cuda and not tokens.is_cuda:
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    for launch in copy_tokens_launches(waiting, scales, into, tokens):
        launch.run()
    for x in (*waiting, *scales):
        if x is not None and into[0].is_cuda and not x.is_cuda:
            _read_until_here(x, device)
    return into


def _read_until_here(x: Tensor, device: torch.device) -> None:
    """Tell the allocator of pinned memory that `x` is read by what this stream was given so far: a copy does, a kernel does not, and
    memory that is let go of would be written anew under its reading."""
    torch.empty(1, dtype=x.dtype, device=device).copy_(x.view(-1)[:1], non_blocking=True)
