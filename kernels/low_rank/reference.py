"""Truncated SVD through LAPACK."""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_svd_reference(x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` leading components of each matrix x [..., L, D].

    Returns U [..., L, r], s [..., r] descending, V [..., D, r] with x ~ (U * s) V^T and r = min(rank, L, D).
    """
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    r = min(rank, s.shape[-1])
    return u[..., :r], s[..., :r], vh[..., :r, :].transpose(-1, -2)
