"""Selection under a budget written for reading: units in order of score, as long as their costs fit."""

from __future__ import annotations

import torch
from torch import Tensor


def select_reference(score: Tensor, threshold: Tensor, cost: Tensor, allowance: int) -> tuple[Tensor, Tensor]:
    """Which units each query head reads, bool [Hq, T, M], and which its KV head unfolds, bool [Hkv, M].

    score [Hq, T, M]; threshold [Hq] (-inf: none); cost int32 [Hkv, M], at least 0, and `allowance` per KV head, in any one unit
    (bytes, or 1 and k for the k best). A query head wants what is above its threshold; a KV head unfolds the longest run of what its group
    wants, in order of the group's best score (equal ones by index), whose costs add up to `allowance` at most.
    """
    kv_heads, units = cost.shape
    group = score.shape[0] // kv_heads
    wanted = (score > float("-inf")) & (score > threshold[:, None, None])
    chosen = torch.zeros(kv_heads, units, dtype=torch.bool, device=score.device)
    for head in range(kv_heads):
        rows = slice(head * group, (head + 1) * group)
        best = score[rows].masked_fill(~wanted[rows], float("-inf")).amax(dim=(0, 1))
        spent = 0
        for unit in best.argsort(descending=True, stable=True).tolist():
            spent += int(cost[head, unit])
            if spent > allowance or best[unit] == float("-inf"):
                break
            chosen[head, unit] = True
    return wanted & chosen.repeat_interleave(group, 0)[:, None], chosen
