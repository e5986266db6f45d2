"""The processes that share a model: which of them this one is, and what a graph or a memory exchanges with the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed._functional_collectives  # noqa: F401 - registers the collectives that graphs call
from torch import Tensor
from torch.distributed import ProcessGroup

from semkv.errors import ConfigError

collectives = torch.ops._c10d_functional
"""Collectives as operators of a graph, which name their group."""

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Ranks:
    """rank: of this process, 0 to size - 1. size: processes that share the model. group: under which torch finds their process group."""

    rank: int
    size: int
    group: str

    def part(self, count: int) -> range:
        """Which of `count` equal things this process has: runs, as even as they can be."""
        return self.part_of(self.rank, count)

    def part_of(self, rank: int, count: int) -> range:
        return range(count * rank // self.size, count * (rank + 1) // self.size)

    def reduce(self, x: Tensor, how: Reduction) -> Tensor:
        """`x` over all processes: their sum, largest or smallest number at each place; every process gets the same bits."""
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), how, self.group))

    def lookup(self, table: Tensor, ids: Tensor, first: int) -> Tensor:
        """Embeddings [..., H] of ids, where this process has the rows of `first` on, table [n, H], and the others have the rest."""
        own = ids - first
        outside = (own < 0) | (own >= len(table))
        found = torch.nn.functional.embedding(own.clamp(0, len(table) - 1), table)
        return self.reduce(found.masked_fill(outside[..., None], 0.0), "sum")


def ranks_of(group: ProcessGroup) -> Ranks:
    """This process among those of `group`. `ConfigError` where it is no group, or this process is not in it."""
    if not isinstance(group, ProcessGroup):
        raise ConfigError(
            f"group is {group!r}; expected a process group: torch.distributed.init_process_group(), then torch.distributed.group.WORLD "
            "or what new_group returned in this process"
        )
    return Ranks(group.rank(), group.size(), group.group_name)


__all__ = ["Ranks", "Reduction", "collectives", "ranks_of"]
