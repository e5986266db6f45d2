"""What launches of these operators are given of a tensor, and what tensors they are made for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.kernels.calls import UnsupportedCall


def strides(name: str, x: Tensor, count: int) -> dict[str, int]:
    """The first `count` strides of x in numbers, as `name_0` and so on; 0 along a size of 1, which other sizes share."""
    own = zip(x.shape[:count], x.stride()[:count])
    return {f"{name}_{axis}": 0 if size == 1 else step for axis, (size, step) in enumerate(own)}


def demand(name: str, x: Tensor, dtypes: Sequence[torch.dtype] | None) -> None:
    """x is of one of these dtypes (None: of any), and its last numbers lie together. Raises `UnsupportedCall`."""
    if (dtypes is not None and x.dtype not in dtypes) or (x.shape[-1] > 1 and x.stride(-1) != 1):
        wanted = "any dtype" if dtypes is None else " or ".join(map(str, dtypes))
        raise UnsupportedCall(
            f"{name} {x.dtype} {tuple(x.shape)} {x.stride()}; expected {wanted}, the last numbers together"
        )


def demand_counts(**counts: Tensor) -> None:
    """Whole numbers int64 [B], one after the other. Raises `UnsupportedCall`."""
    for name, x in counts.items():
        demand(name, x, (torch.int64,))


__all__ = ["demand", "demand_counts", "strides"]
