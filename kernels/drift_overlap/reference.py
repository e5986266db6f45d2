"""Overlap of top sets, by a sort."""

from __future__ import annotations

import torch
from torch import Tensor


def drift_overlap_reference(weights: Tensor, baseline: Tensor, k: int) -> Tensor:
    """Share of a baseline that is among the k largest weights, float32 [P] (HeteroCache Sec. 4.3).

    weights [P, n] of P pivots, the first of equal ones larger; baseline bool [P, n], at least one and at most k tokens each.
    """
    top = torch.zeros_like(baseline).scatter_(1, weights.argsort(dim=1, descending=True, stable=True)[:, :k], True)
    return (top & baseline).sum(1).float() / baseline.sum(1).float()
