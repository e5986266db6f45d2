"""Codes of a token sketch in few bits: a uniform quantiser whose steps come from calibration, so no token stores any."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308}
"""Step in standard deviations that loses least of a normal variable, by bits (Max 1960, Table II)."""


def encode(codes: Tensor, mean: Tensor, std: Tensor, bits: int) -> Tensor:
    """Levels int8 in [-2^(bits-1), 2^(bits-1)) of codes [..., n, r], with mean and std [..., r] of each dimension."""
    if bits not in STEPS:
        raise ValueError(f"bits is {bits}, expected 1 to {max(STEPS)}")
    step = STEPS[bits] * std.clamp(min=1e-20)
    levels = torch.floor((codes - mean[..., None, :]) / step[..., None, :])
    half = 1 << (bits - 1)
    return levels.clamp(-half, half - 1).to(torch.int8)


def decode(levels: Tensor, mean: Tensor, std: Tensor, bits: int) -> Tensor:
    """The codes [..., n, r] that levels stand for: the middle of each step."""
    return mean[..., None, :] + (levels.to(mean.dtype) + 0.5) * (STEPS[bits] * std)[..., None, :]
