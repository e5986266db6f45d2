"""Exact tokens left in the pages that they are stored in, instead of gathered into one tensor a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.errors import InputError


@dataclass(frozen=True)
class PagedTokens:
    """A pool of slots and, for each row, the pages of it that hold the row's exact tokens, in order.

    k [Hkv, slots, D], v [Hkv, slots, Dv], positions [Hkv|1, slots] (integers); pages int32 [B, Hkv|1, P]: page p has slots
    p * page_size to (p + 1) * page_size - 1; counts int32 [B]: tokens of each row, at most P * page_size. What stands in
    `pages` beyond them is not read.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    pages: Tensor
    counts: Tensor
    page_size: int

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.k.shape[1] % self.page_size:
            raise InputError(
                f"page_size is {self.page_size} for {self.k.shape[1]} slots; expected a size that divides them"
            )
        for name in ("pages", "counts"):
            if getattr(self, name).dtype != torch.int32:
                raise InputError(f"{name!r} is {getattr(self, name).dtype}; expected torch.int32")

    @property
    def capacity(self) -> int:
        """P * page_size: the most tokens that a row can have, and the last side of a bias on them."""
        return self.pages.shape[-1] * self.page_size

    def gathered(self, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same tokens as a block's k, v, positions and bias of `semkv.ir.memory.Entries`.

        N is `capacity`; what a row does not have is zero, at position 0, with bias -inf. bias: [B, Hq|1, T|1, N].
        """
        batch, kv_heads = len(self.counts), self.k.shape[0]
        entry = torch.arange(self.capacity, dtype=torch.int64, device=self.k.device)
        there = entry < self.counts[:, None]  # [B, N]
        slot = self.pages.long()[..., entry // self.page_size] * self.page_size + entry % self.page_size
        slot = slot.masked_fill(~there[:, None], 0)  # [B, Hkv|1, N]
        by_head = slot.expand(batch, kv_heads, -1)
        head = torch.arange(kv_heads, dtype=torch.int64, device=self.k.device)[:, None]
        k, v = (x[head, by_head].masked_fill(~there[:, None, :, None], 0.0) for x in (self.k, self.v))
        if self.positions.shape[0] > 1:
            places = self.positions[head, by_head]
        else:
            places = self.positions[0][slot]
        places = places.masked_fill(~there[:, None], 0)
        absent = torch.zeros(there.shape, dtype=torch.float32, device=self.k.device).masked_fill(~there, float("-inf"))
        absent = absent[:, None, None]
        return k, v, places, absent if bias is None else bias + absent
