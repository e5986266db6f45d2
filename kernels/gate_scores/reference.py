"""SeKV's gate written for reading: every summary is rebuilt from the mean key that it is stored as."""

from __future__ import annotations

import torch
from torch import Tensor


def gate_scores_reference(
    q: Tensor,
    weight: Tensor,
    codes: Tensor,
    scale: Tensor,
    norms: Tensor,
    lengths: Tensor,
    offset: Tensor,
    threshold: Tensor,
    *,
    bits: int,
) -> Tensor:
    """How far each span's gate is above its head's threshold, [Hq, T, M] (SeKV Eq. 3-5 and 9).

    (W q).(W mean key) / norm / sqrt(d') + log length - offset - threshold. q [Hq, T, D]; weight W [Hq, d', D]; codes uint8
    [Hkv, M, D] at 8 bits or [Hkv, M, ceil(D / 2)] at 4, the low half first, with scale [Hkv, M, 1]: mean keys as
    `semkv.runtime.store.quantization` stores them; norms [Hq, M, 1] of W mean key; lengths [Hkv|1, M] in tokens; offset and threshold
    [Hq]. Computed in the dtype of `weight`.
    """
    dtype = weight.dtype
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : weight.shape[-1]]
    means = (codes.to(dtype) - (1 << (bits - 1))) * scale.to(dtype)
    group = q.shape[0] // means.shape[0]
    summaries = means.repeat_interleave(group, 0) @ weight.mT / norms.to(dtype)  # [Hq, M, d']
    query = q.to(dtype) @ weight.mT  # [Hq, T, d']
    sizes = lengths.expand(len(means), -1).repeat_interleave(group, 0).to(dtype).log()
    return (
        query @ summaries.mT / weight.shape[1] ** 0.5 + sizes[:, None] - (offset + threshold).to(dtype)[:, None, None]
    )
