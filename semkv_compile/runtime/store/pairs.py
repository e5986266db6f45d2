"""Pairs of neighbouring units that become one each, in what is held of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.runtime.store.quantization import Held, Quantized, dequantize, quantize


class Pairs:
    """The units `lefts`, ascending, and the one after each."""

    def __init__(self, lefts: Sequence[int]) -> None:
        self.lefts = lefts
        self._both: slice | list[int] = slice(lefts[0], lefts[0] + 2)
        if len(lefts) > 1:
            self._both = [unit for left in lefts for unit in (left, left + 1)]

    def of(self, x: Quantized | Tensor) -> tuple[Tensor, Tensor]:
        """Of x [H, M, ...] the first units of the pairs and the second ones, float32 [H, P, ...]."""
        numbers = dequantize(x[:, self._both])
        return numbers[:, ::2], numbers[:, 1::2]

    def mean(self, x: Quantized | Tensor, share: Tensor) -> Tensor:
        """Means of x [H, M, D] in which the first unit has `share` [Hkv|1, P]: float32 [H, P, D]."""
        first, second = self.of(x)
        if len(share) not in (1, len(first)):  # x is of query heads, several to a KV head
            share = share.repeat_interleave(len(first) // len(share), 0)
        own = share[..., None]
        return first * own + second * (1 - own)

    def joined(self, held: Held, made: Tensor) -> Held:
        """`held` [H, M, ...] with `made` float32 [H, P, ...] in the places of the pairs; all else stays as it is, bit for bit."""
        if isinstance(held, Quantized):
            new = quantize(made, held.bits)
            return Quantized(
                self._joined(held.codes, new.codes), self._joined(held.scale, new.scale), held.bits, held.dim
            )
        return self._joined(held, made.to(held.dtype))

    def _joined(self, x: Tensor, made: Tensor) -> Tensor:
        parts, start = [], 0
        for place, left in enumerate(self.lefts):
            parts += [x[:, start:left], made[:, place : place + 1]]
            start = left + 2
        return torch.cat([*parts, x[:, start:]], 1)

    def numbers(self, count: int) -> Tensor:
        """int64 [count]: of each unit the number that it has then."""
        steps = torch.ones(count, dtype=torch.int64, device="cpu")
        steps[[left + 1 for left in self.lefts]] = 0
        return steps.cumsum(0) - 1


__all__ = ["Pairs"]
