"""The arguments of one call of `semkv::mixed_attention`, with what every form asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from semkv.ir.memory import Entries
from semkv.ir.ops import value_dim
from semkv.kernels.mixed_attention.blocks import Block, flat_blocks, kv_heads_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Of the numbers that kernels take; codes have a scale beside them."""


@dataclass(frozen=True)
class AttentionCall:
    """One call; shapes are those of `mixed_attention_reference`."""

    q: Tensor
    q_positions: Tensor
    entries: Entries
    sinks: Tensor | None = None
    bias_slopes: Tensor | None = None
    bias_table: Tensor | None = None
    scale: float = 1.0
    softcap: float = 0.0
    window: int = 0
    fresh: bool = False

    @classmethod
    def of(cls, q: Tensor, q_positions: Tensor, *arguments: Any, **keywords: Any) -> AttentionCall:
        """From the operator's arguments in its order or by its names; without any, there are no entries."""
        count = len(Entries._fields)
        named = {name: keywords.pop(name) for name in Entries._fields if name in keywords}
        own = arguments[:count] or (() if "block_k" in named else ([], [], []))
        return cls(q, q_positions, Entries(*own, **named), *arguments[count:], **keywords)

    @cached_property
    def kv_heads(self) -> int:
        return kv_heads_of(self.q.shape[0], self.q.shape[1], self.entries.block_k, self.entries.block_heads)

    @cached_property
    def value_dim(self) -> int:
        """Dv, see `semkv.ir.ops.value_dim`."""
        return value_dim(self.q, self.entries.block_v, self.entries.block_v_scale, self.entries.value_v)

    @property
    def plain(self) -> bool:
        """Whether it is causal attention over one block of numbers as they are, which PyTorch has an operator for."""
        own, blocks = self.entries, self.entries.block_k
        terms = (
            self.softcap or self.window or any(x is not None for x in (self.sinks, self.bias_slopes, self.bias_table))
        )
        return (
            not terms
            and len(blocks) == 1
            and own.block_heads is None
            and own.block_bias is None
            and own.key_u is None
            and self.q.dtype == blocks[0].dtype == own.block_v[0].dtype
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor among its arguments."""
        for x in (self.q, self.q_positions, *self.entries, self.sinks, self.bias_slopes, self.bias_table):
            yield from (part for part in (x if isinstance(x, list) else [x]) if isinstance(part, Tensor))

    def blocks(self) -> list[Block]:
        """Its blocks, rows and heads in one dimension."""
        group = self.q.shape[1] // self.kv_heads
        return flat_blocks(self.entries, group, self.q.shape[-1], self.value_dim)
