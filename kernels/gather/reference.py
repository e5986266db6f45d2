"""Gather of waiting tokens, one at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_tokens_reference(
    waiting: Tensor, index: Tensor, scale: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """The tokens at `index` int64 [Hkv, s] of `waiting` [Hkv, n, D], in `dtype`: [Hkv, s, D], zero where the index is negative.

    scale float16 [Hkv, n, 1]: `waiting` are the codes uint8 of `semkv.runtime.quantization` in 8 bits, (code - 128) * scale.
    """
    heads, count = index.shape
    out = torch.zeros(heads, count, waiting.shape[2], dtype=dtype)
    for head in range(heads):
        for place, token in enumerate(index[head].tolist()):
            if token >= 0:
                found = waiting[head, token]
                if scale is not None:
                    found = (found.float() - 128) * scale[head, token].float()
                out[head, place] = found.to(dtype)
    return out.to(index.device)
