"""`semkv::unfold_` on a GPU: the reference decides in tensors what comes, and one kernel copies it from where it waits."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from semkv.kernels.state.reference import copy_reference, unfold_by


def copy_there(
    host: Tensor, host_scale: Tensor | None, into: Tensor, scale: Tensor | None, source: Tensor, copied: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`copy_reference` by a kernel, which reads only what is copied: memory of the host crosses the link for that. Returns what it wrote
    to, `into` and `scale`."""
    parts = (host, host_scale, into, scale)
    if find_spec("triton") is None or not all(x is None or x.is_contiguous() for x in parts):
        copy_reference(host, host_scale, into, scale, source, copied)
        return into, scale
    from semkv.kernels.gather.triton import copy_tokens_launches

    rows, heads, slots = source.shape
    head = torch.arange(rows * heads, dtype=torch.int64, device=source.device).view(rows, heads, 1)
    at = torch.arange(source.numel(), dtype=torch.int64, device=source.device)
    tokens = torch.stack([torch.where(copied, head, -1).flatten(), source.flatten(), at])
    pairs = [(host, None if scale is not None else host_scale, into)]
    if scale is not None and host_scale is not None:
        pairs.append((host_scale, None, scale))
    for x, by, there in pairs:
        given = [x.flatten(0, 1)], [None if by is None else by.flatten(0, 1)], [there.view(rows * heads * slots, -1)]
        for launch in copy_tokens_launches(*given, tokens):
            launch.run()
    return into, scale


unfold_there = partial(unfold_by, copy_there)
"""`semkv::unfold_`, of tensors on a GPU that may be mapped from page-locked memory of the host."""

__all__ = ["copy_there", "unfold_there"]
