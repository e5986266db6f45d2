"""Which entries a query reads, where that is not all of its past: what a `Choice` names, or its own chunk."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen_bias(chosen: Tensor, places: Tensor) -> Tensor:
    """float32 [B, H, T, N]: 0 where the token at one of `places` [B, H, N] in its row is among `chosen` [B, T, n], else -inf.

    Whole numbers both; those below 0 among the chosen are none.
    """
    rows, tokens, _ = chosen.shape
    last = int(chosen.max()) + 1  # of places that are chosen; behind it, where all others go
    read = torch.zeros(rows, tokens, last + 1, dtype=torch.bool, device=chosen.device)
    read.scatter_(2, torch.where(chosen < 0, last, chosen).to(torch.int64), True)
    read[..., last] = False
    index = places.to(torch.int64).clamp(max=last)[:, :, None].expand(-1, -1, tokens, -1)
    seen = read[:, None].expand(-1, index.shape[1], -1, -1).gather(3, index)
    return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill(~seen, float("-inf"))


def chunk_bias(asking: Tensor, positions: Tensor, chunk: int) -> Tensor:
    """float32 [B, H, T, N]: 0 where a position [B, H, N] is in the same run of `chunk` ones as that of a query [B, T], else -inf."""
    runs = [torch.div(x.to(torch.int64), chunk, rounding_mode="floor") for x in (asking, positions)]
    same = runs[0][:, None, :, None] == runs[1][:, :, None]
    return torch.zeros(same.shape, dtype=torch.float32, device=same.device).masked_fill(~same, float("-inf"))


__all__ = ["chosen_bias", "chunk_bias"]
