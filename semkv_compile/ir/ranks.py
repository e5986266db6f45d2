"""The processes that share a model: which of them this one is, and what a graph or a memory exchanges with the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from semkv.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

collectives = torch.ops._c10d_functional
"""Collectives as operators of a graph, which name their group."""

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Ranks:
    """rank: of this process, 0 to size - 1. size: processes that share the model. group: under which torch finds their process group.
    host: a group of the same processes for tensors on the host, where the other one has no way for them, as NCCL's."""

    rank: int
    size: int
    group: str
    host: str = ""

    def __post_init__(self) -> None:
        import torch.distributed._functional_collectives  # noqa: F401 - registers the collectives that graphs call

    def part(self, count: int) -> range:
        """Which of `count` equal things this process has: runs, as even as they can be."""
        return self.part_of(self.rank, count)

    def part_of(self, rank: int, count: int) -> range:
        """The same of another process."""
        return range(count * rank // self.size, count * (rank + 1) // self.size)

    def reduce(self, x: Tensor, how: Reduction) -> Tensor:
        """`x` over all processes: their sum, largest or smallest number at each place; every process gets the same bits."""
        group = self.host if self.host and x.device.type == "cpu" else self.group
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), how, group))

    def lookup(self, table: Tensor, ids: Tensor, first: int) -> Tensor:
        """Embeddings [..., H] of ids, where this process has the rows of `first` on, table [n, H], and the others have the rest."""
        own = ids - first
        outside = (own < 0) | (own >= len(table))
        found = torch.nn.functional.embedding(own.clamp(0, len(table) - 1), table)
        return self.reduce(found.masked_fill(outside[..., None], 0.0), "sum")


@dataclass(frozen=True)
class Among:
    """What a process has of an attention that it shares with others.

    parts: the KV heads of each process, in the order of the program before it was shared. kv, query: this one's. kv_heads: of the whole
    attention. sharers: processes that have the same heads. order: the user's model's KV head at each place of that program; empty where
    they are in order.
    """

    ranks: Ranks
    parts: tuple[tuple[int, ...], ...]
    kv: tuple[int, ...]
    query: tuple[int, ...]
    kv_heads: int
    sharers: int = 1
    order: tuple[int, ...] = ()

    def apart(self, places: Iterable[int]) -> bool:
        """Whether no process has all of these KV heads of the whole attention."""
        wanted = set(places)
        return not any(wanted.issubset(part) for part in self.parts)

    def counts(self, *own: int) -> list[int]:
        """Counts over this process's heads, over all heads."""
        return self.sum(torch.tensor(own, dtype=torch.float64, device="cpu")).round().long().tolist()

    def sum(self, x: Tensor) -> Tensor:
        """A sum over this process's heads, over all heads."""
        return self.ranks.reduce(x / self.sharers if self.sharers > 1 else x, "sum")


def ranks_of(group: ProcessGroup) -> Ranks:
    """This process among those of `group`. `ConfigError` where it is no group, or this process is not in it."""
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group is {group!r}; expected a process group: torch.distributed.init_process_group(), then torch.distributed.group.WORLD "
            "or what new_group returned in this process"
        )
    host = ""
    if "cpu:" not in dist.get_backend_config(group):
        members = dist.get_process_group_ranks(group)
        host = dist.new_group(members, backend="gloo", use_local_synchronization=True).group_name
    return Ranks(group.rank(), group.size(), group.group_name, host)


__all__ = ["Among", "Ranks", "Reduction", "collectives", "ranks_of"]
