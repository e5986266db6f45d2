"""Waiting tokens to the slots of a workspace, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def copy_tokens_reference(
    waiting: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    into: Sequence[Tensor],
    heads: Tensor,
    places: Tensor,
    at: Tensor,
) -> None:
    """Write the tokens at `places` int64 [n] of `heads` int64 [n] into the rows `at` int64 [n], which are distinct.

    waiting: [Hkv, N, D] each, keys and values. Where `scales` has float16 [Hkv, N, 1], they are the codes uint8 of
    `semkv.runtime.store.quantization` in 8 bits, which stand for (code - 128) * scale. into: [rows, D] each.
    """
    for x, scale, out in zip(waiting, scales, into):
        for head, place, row in zip(heads.tolist(), places.tolist(), at.tolist()):
            found = x[head, place]
            if scale is not None:
                found = (found.float() - 128) * scale[head, place].float()
            out[row] = found.to(out.dtype)
