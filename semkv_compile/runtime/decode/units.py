"""What a router reads of folded units in a step's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from semkv.ir import state_ops
from semkv.ir.site import AttentionSite


@dataclass(frozen=True)
class Units:
    """The units of some KV heads of B rows, of which row b has the first `count[b]`, int64 [B]; the tensors [B, ...] of the part by
    name. passing: what a router's `scores` leaves for its `rest`."""

    site: AttentionSite
    tensors: Mapping[str, Tensor]
    count: Tensor
    passing: dict[str, Tensor] = field(default_factory=dict)

    def numbers(self, name: str) -> tuple[Tensor, Tensor | None]:
        """(codes, scale), or (numbers, None), of what is held per unit under `name`."""
        if name in self.tensors:
            return self.tensors[name], self.tensors.get(f"{name}_scale")
        return self.tensors[f"{name}.codes"], self.tensors[f"{name}.scale"]

    def products(self, q: Tensor, name: str) -> Tensor:
        """float32 q [B, H, R, D] times what is held under `name`, [B, H, M, D]: float32 [B, H, R, M]."""
        x, scale = self.numbers(name)
        if scale is None:
            return state_ops.products(q, x)
        return state_ops.products(q, x, scale, 8 if x.shape[-1] == q.shape[-1] else 4)

    def exists(self, like: Tensor) -> Tensor:
        """bool [B, 1, M]: the units that there are, of `like` [B, H, M]."""
        number = torch.ones_like(like[:, :1], dtype=torch.int64).cumsum(-1)
        return number <= self.count.view(-1, 1, 1)

    def constant(self, name: str) -> Tensor:
        """What the router's `constants` have under `name`."""
        return self.tensors[f"constant.{name}"]


__all__ = ["Units"]
