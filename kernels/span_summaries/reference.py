"""Summaries of spans, one span at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def span_summaries_reference(
    x: Tensor, starts: Tensor, lengths: Tensor, surprisal: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, minimum and maximum [H, s, D] of keys or values x [H, n, D] over spans: starts and lengths int64 [s], at least 1.

    surprisal float32 [n], not negative: tokens weigh by their share of their span's (SeKV Eq. 2), all the same where that is 0.
    In float32, or float64 where `x` is.
    """
    x = x if x.dtype == torch.float64 else x.float()
    means, lows, highs = [], [], []
    for start, length in zip(starts.tolist(), lengths.tolist()):
        tokens = x[:, start : start + length]
        weights = x.new_ones(length) if surprisal is None else surprisal[start : start + length].to(x.dtype)
        weights = weights if weights.sum() > 0 else torch.ones_like(weights)
        means.append((tokens * (weights / weights.sum())[:, None]).sum(1))
        lows.append(tokens.amin(1))
        highs.append(tokens.amax(1))
    return torch.stack(means, 1), torch.stack(lows, 1), torch.stack(highs, 1)
