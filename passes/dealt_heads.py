"""Which KV heads each of several processes has, where heads of a layer take different shares of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from semkv.ir.ranks import Ranks
from semkv.ir.site import AttentionSite

Deal = list[list[int]]
"""KV heads by process."""


def dealt_heads(
    stores: Sequence[AttentionSite], nbytes: Mapping[int, Sequence[float]], ranks: Ranks
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """By store, the KV heads of each process, ascending, as places in the program, so that all processes hold about as many bytes over all
    stores. Every process works out the same.

    As many heads for each process as in runs. First the largest head goes to the process that has least so far; then heads of the process
    that has most are exchanged for others', while that takes from the larger of the two.

    nbytes: by store, what each KV head of the user's model takes. Stores that are not in it, whose heads all take as much, or that have
    fewer heads than there are processes, are left out: theirs are runs.
    """
    costs = {
        store.store: [nbytes[store.store][head] for head in store.head_order or range(store.kv_heads)]
        for store in stores
        if store.store in nbytes and store.kv_heads >= ranks.size and len(set(nbytes[store.store])) > 1
    }
    held, deals = [0.0] * ranks.size, {}
    for store, cost in costs.items():
        deals[store] = _deal(cost, held)
    while _exchanged(deals, costs, held):
        pass
    return {store: tuple(tuple(sorted(own)) for own in deal) for store, deal in deals.items()}


def _deal(cost: Sequence[float], held: list[float]) -> Deal:
    """The heads of a store, dealt to those that hold least; `held` is brought up to date."""
    count, size = len(cost), len(held)
    room = [count * (rank + 1) // size - count * rank // size for rank in range(size)]
    deal: Deal = [[] for _ in held]
    for head in sorted(range(count), key=lambda head: (-cost[head], head)):
        rank = min((rank for rank in range(size) if room[rank]), key=lambda rank: (held[rank], rank))
        deal[rank].append(head)
        held[rank] += cost[head]
        room[rank] -= 1
    return deal


def _exchanged(deals: Mapping[int, Deal], costs: Mapping[int, Sequence[float]], held: list[float]) -> bool:
    """Whether two heads of a store were exchanged between the process that holds most and another one: those of which the larger of the two
    is smallest then."""
    most = max(range(len(held)), key=held.__getitem__)
    best: tuple[float, int, int, int, int] | None = None
    for store, deal in deals.items():
        for rank in range(len(held)):
            for own, other in product(deal[most], deal[rank]):
                moved = costs[store][own] - costs[store][other]
                larger = max(held[most] - moved, held[rank] + moved)
                if rank != most and larger < (1 - 1e-9) * held[most] and (best is None or larger < best[0]):
                    best = (larger, store, rank, own, other)
    if best is None:
        return False
    _, store, rank, own, other = best
    moved = costs[store][own] - costs[store][other]
    deals[store][most][deals[store][most].index(own)] = other
    deals[store][rank][deals[store][rank].index(other)] = own
    held[most] -= moved
    held[rank] += moved
    return True


__all__ = ["dealt_heads"]
