"""The device budget of one row: how many bytes each KV store may hold on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from semkv.errors import BudgetError
from semkv.ir.site import AttentionSite


@dataclass(frozen=True)
class Budget:
    """A cap on device-resident KV bytes, per row.

    `value` is a fraction of the full KV of the tokens so far, a whole number of tokens per KV head and layer, or None
    (no cap). The full KV are the keys and values of all tokens in `dtype`, over the stores that the method treats.
    """

    value: float | int | None
    dtype: torch.dtype

    def full_bytes(self, store: AttentionSite, tokens: int) -> int:
        """Bytes of the full KV of `tokens` tokens in one store."""
        return tokens * store.values_per_token * self.dtype.itemsize

    def average_tokens(self, tokens: int) -> float:
        """Tokens at full resolution per KV head and store, over all stores, when the row has `tokens` tokens."""
        if self.value is None:
            return float("inf")
        return self.value if isinstance(self.value, int) else self.value * tokens

    def cap_bytes(self, stores: tuple[AttentionSite, ...], tokens: int) -> int:
        """Bytes that all `stores` together may hold: the hard cap of one row."""
        if self.value is None:
            raise BudgetError("no budget was given: a cap exists only for a fraction or a number of tokens")
        total = 0
        for store in stores:
            uniform = self.value if isinstance(self.value, int) else self.value * tokens
            total += int(uniform * store.values_per_token * self.dtype.itemsize)
        return total


def bounded_shares(
    stores: Sequence[AttentionSite], shares: Sequence[float], budget: float, least: float, most: float
) -> list[float]:
    """`shares` of an average of `budget` tokens per store, changed so that each store gets `least` to `most` tokens.

    What the bounds give to one store is taken from the others in proportion to their shares. Where the average itself lies
    outside of the bounds, all stores get the same.
    """
    least *= 1.001  # so that a store at the bound is still there when bytes are rounded down
    if not least < budget < most:
        return [1 / len(stores)] * len(stores)
    weights = [store.values_per_token for store in stores]
    total = budget * sum(weights)

    def sizes(scale: float) -> list[float]:
        return [min(max(scale * share, least), most) for share in shares]

    low, high = 0.0, 1.0
    while high < 2.0**60 and sum(size * weight for size, weight in zip(sizes(high), weights)) < total:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if sum(size * weight for size, weight in zip(sizes(middle), weights)) < total:
            low = middle
        else:
            high = middle
    made = sizes(high)
    return [size / sum(made) for size in made]
