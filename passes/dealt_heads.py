"""Which KV heads each of several processes has, where heads of a layer take different shares of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

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
        deals[store] = _deal(cost, held, ranks)
    while (best := _best_exchange(deals, costs, held)) is not None:
        _exchange(deals[best.store], costs[best.store], held, best)
    return {store: tuple(tuple(sorted(own)) for own in deal) for store, deal in deals.items()}


def _deal(cost: Sequence[float], held: list[float], ranks: Ranks) -> Deal:
    """The heads of a store, dealt to those that hold least; `held` is brought up to date."""
    room = [len(ranks.part_of(rank, len(cost))) for rank in range(ranks.size)]
    deal: Deal = [[] for _ in held]
    for head in sorted(range(len(cost)), key=lambda head: (-cost[head], head)):
        rank = min((rank for rank in range(ranks.size) if room[rank]), key=lambda rank: (held[rank], rank))
        deal[rank].append(head)
        held[rank] += cost[head]
        room[rank] -= 1
    return deal


class _Exchange(NamedTuple):
    """Of head `own` of a store, which process `most` has, for head `other` of process `rank`. larger: bytes of the one of the two that
    holds more then."""

    larger: float
    store: int
    most: int
    rank: int
    own: int
    other: int


def _best_exchange(
    deals: Mapping[int, Deal], costs: Mapping[int, Sequence[float]], held: Sequence[float]
) -> _Exchange | None:
    """That takes most from the process that holds most; None where none takes from it without giving another one as much."""
    most = max(range(len(held)), key=held.__getitem__)
    found = []
    for store, deal in deals.items():
        for rank in set(range(len(held))) - {most}:
            for own, other in product(deal[most], deal[rank]):
                moved = costs[store][own] - costs[store][other]
                found.append(_Exchange(max(held[most] - moved, held[rank] + moved), store, most, rank, own, other))
    best = min(found, default=None)
    return best if best is not None and best.larger < (1 - 1e-9) * held[most] else None


def _exchange(deal: Deal, cost: Sequence[float], held: list[float], made: _Exchange) -> None:
    moved = cost[made.own] - cost[made.other]
    for rank, gone, come, less in ((made.most, made.own, made.other, moved), (made.rank, made.other, made.own, -moved)):
        deal[rank][deal[rank].index(gone)] = come
        held[rank] -= less


__all__ = ["dealt_heads"]
