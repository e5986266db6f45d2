"""Randomised truncated SVD whose inner loop is matmuls (Halko, Martinsson and Tropp, 2011)."""

from __future__ import annotations

import torch
from torch import Tensor


def randomized_svd(
    x: Tensor, rank: int, *, oversample: int = 8, iterations: int = 2, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` leading components of each matrix x [..., L, D], as `truncated_svd_reference` returns them.

    A random projection finds the range, `iterations` power steps sharpen it, and the small problem that is left is solved
    through the eigenvectors of its Gram matrix. Where rank + oversample reaches min(L, D) nothing is random. Without a
    `generator` the projection is one and the same for every call of a shape: what a row gets does not depend on its neighbours,
    and the global generator stays as it is.
    """
    length, dim = x.shape[-2:]
    r = min(rank, length, dim)
    width = min(r + oversample, length, dim)
    work = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if width < min(length, dim):
        generator = generator or torch.Generator(work.device).manual_seed(0)
        omega = torch.randn(dim, width, dtype=work.dtype, device=work.device, generator=generator)
        basis = _orthonormal(work @ omega)
        for _ in range(iterations):
            basis = _orthonormal(work @ _orthonormal(work.transpose(-1, -2) @ basis))
        small = basis.transpose(-1, -2) @ work  # [..., width, D]
    elif length <= dim:
        basis, small = None, work
    else:
        v, s, u = randomized_svd(work.transpose(-1, -2), rank)
        return u, s, v
    values, vectors = torch.linalg.eigh(small @ small.transpose(-1, -2))  # ascending
    s = values.flip(-1)[..., :r].clamp(min=0).sqrt()
    u = vectors.flip(-1)[..., :r]
    v = (small.transpose(-1, -2) @ u) / s.clamp(min=torch.finfo(s.dtype).tiny)[..., None, :]
    v = torch.where(s[..., None, :] > 0, v, torch.zeros_like(v))
    return (u if basis is None else basis @ u), s, v


def _orthonormal(x: Tensor) -> Tensor:
    return torch.linalg.qr(x).Q
