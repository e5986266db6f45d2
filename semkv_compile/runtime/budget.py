"""The device budget of one row: how many bytes each KV store may hold on the device."""

from __future__ import annotations

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

    def cap_tokens(self, stores: int, store: AttentionSite, tokens: int) -> float:
        """Tokens at full resolution that one store of `stores` budgeted ones may hold when the row has `tokens` tokens."""
        if self.value is None:
            return float("inf")
        uniform = self.value if isinstance(self.value, int) else self.value * tokens
        return uniform * store.budget_share * stores

    def cap_bytes(self, stores: tuple[AttentionSite, ...], tokens: int) -> int:
        """Bytes that all `stores` together may hold: the hard cap of one row."""
        if self.value is None:
            raise BudgetError("no budget was given: a cap exists only for a fraction or a number of tokens")
        total = 0
        for store in stores:
            uniform = self.value if isinstance(self.value, int) else self.value * tokens
            total += int(uniform * store.values_per_token * self.dtype.itemsize)
        return total
