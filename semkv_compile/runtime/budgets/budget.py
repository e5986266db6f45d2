"""The device budget of one row: how many bytes each KV store may hold on the device."""

from __future__ import annotations

import math
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

    floor: of a fraction, tokens per KV head and layer that every row may hold, however short it is: rows of up to so many are
    exact, and the cap never shrinks as a row grows. 0: the fraction alone. page_size: tokens in a page of exact ones.
    """

    value: float | int | None
    dtype: torch.dtype
    floor: int = 0
    page_size: int = 8

    @property
    def keeps_all(self) -> bool:
        """Whether it is the whole KV: every token of every row is exact."""
        return isinstance(self.value, float) and self.value == 1.0

    @property
    def uncapped(self) -> bool:
        """Whether nothing bounds what a row holds, so that stores may be allocated ahead of need."""
        return self.value is None or self.keeps_all

    @property
    def in_force_from(self) -> int:
        """Tokens of a row from which on the fraction is more than the floor; 0 where there is no floor."""
        if not self.floor or not isinstance(self.value, float) or self.keeps_all:
            return 0
        return math.ceil(self.floor / self.value)

    def exact(self, tokens: int) -> bool:
        """Whether a row of `tokens` tokens is held whole."""
        return self.keeps_all or tokens <= self.floor

    def full_bytes(self, store: AttentionSite, tokens: int) -> int:
        """Bytes of the full KV of `tokens` tokens in one store."""
        return tokens * store.values_per_token * self.dtype.itemsize

    def held_bytes(self, store: AttentionSite, tokens: int) -> int:
        """Bytes that `tokens` exact tokens of one store take: with their positions, and a page that is not full."""
        return (tokens + self.page_size) * int(store.values_per_token * self.dtype.itemsize + 4 * store.once)

    def average_tokens(self, tokens: int) -> float:
        """Tokens at full resolution per KV head and store, over all stores, when the row has `tokens` tokens."""
        if self.value is None:
            return float("inf")
        return self.value if isinstance(self.value, int) else max(self.value * tokens, self.floor)

    def strict_bytes(self, stores: tuple[AttentionSite, ...], tokens: int) -> int:
        """Bytes of all `stores` together by the fraction, or number of tokens, alone."""
        if self.value is None:
            raise BudgetError("no budget was given: a cap exists only for a fraction or a number of tokens")
        return sum(self._strict_bytes(store, tokens) for store in stores)

    def cap_bytes(self, stores: tuple[AttentionSite, ...], tokens: int) -> int:
        """Bytes that all `stores` together may hold: the hard cap of one row."""
        strict = self.strict_bytes(stores, tokens)
        if self.keeps_all:
            return sum(self.held_bytes(store, tokens) for store in stores)
        return max(strict, sum(self.held_bytes(store, self.floor) for store in stores)) if self.floor else strict

    def _strict_bytes(self, store: AttentionSite, tokens: int) -> int:
        uniform = self.value if isinstance(self.value, int) else self.value * tokens
        return int(uniform * store.values_per_token * self.dtype.itemsize)


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
