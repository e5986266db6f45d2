"""The largest numbers of each row, without sorting what is far from the cut."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLED_FROM = 8192
"""Columns from which a sample brackets the cut first: below, the partial sort is as quick."""
STRIDE = 16


def largest(x: Tensor, count: int) -> Tensor:
    """bool [H, M]: exactly `count` of each row of x float32 [H, M], the largest; among equals at the cut any."""
    if x.device.type == "cpu" and x.shape[1] >= SAMPLED_FROM and 0 < count < x.shape[1]:
        found = _bracketed(x, count)
        if found is not None:
            return found
    chosen = torch.zeros_like(x, dtype=torch.bool)
    return chosen.scatter_(1, x.topk(count, dim=1, sorted=False).indices, True)


def _bracketed(x: Tensor, count: int) -> Tensor | None:
    """A sample of each row says between which two of its numbers the cut lies; only what is there is sorted. None where it erred."""
    sample = x[:, ::STRIDE]
    rank = count * sample.shape[1] / x.shape[1]
    spread = 4 * math.sqrt(rank) + 2  # four standard deviations of how many of the sample are above the cut
    below, above = math.ceil(rank + spread), math.floor(rank - spread)
    if below >= sample.shape[1]:
        return None
    ordered = sample.topk(below, dim=1).values
    low = ordered[:, -1:]
    chosen = x > ordered[:, above - 1 : above] if above > 0 else torch.zeros_like(x, dtype=torch.bool)
    between = (x >= low).logical_and_(~chosen)
    lacking = (count - chosen.sum(1)).tolist()
    found = between.sum(1).tolist()
    if any(not 0 <= need <= have for need, have in zip(lacking, found)):
        return None
    columns = between.nonzero()[:, 1].split(found)
    for row, (at, need) in enumerate(zip(columns, lacking)):
        chosen[row, at[x[row, at].topk(need, sorted=False).indices]] = True
    return chosen
