"""Budgets of layers that keep single tokens, in whole pages: with uneven shares they hold as much in all as with even ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from semkv.ir.site import AttentionSite
from semkv.runtime.budgets.costs import exact_nbytes
from semkv.runtime.components import Components
from semkv.runtime.placement import Placement

MARGIN = 1e-6
"""Of the budget, what pages leave free, so that a share that is rounded still holds them."""


def exact_token_nbytes(site: AttentionSite, components: Components, dtype: torch.dtype) -> int:
    """Device bytes of an exact token of a prompt in one KV head: with its position, and its score where it has one."""
    return exact_nbytes(site, components, dtype) + 4 + (4 if components.evictor is not None else 0)


def shares_in_pages(placement: Placement, shares: Mapping[int, float], cap: float) -> dict[int, float]:
    """`shares` of `cap` device bytes, by store, changed so that what every store keeps of a prompt is whole pages, by `whole_pages`; what
    those leave is divided evenly. As they are where shares are even, or some store does more than keep tokens."""
    stores, plan = placement.division
    parts = {store.store: plan.parts[store.store] for store in stores}
    keeps = all(len(own) == 1 and own[0].components.keeper is not None for own in parts.values())
    total = sum(store.values_per_token for store in stores)
    even = {store.store: store.values_per_token / total for store in stores}
    if not shares or not keeps or cap == float("inf") or all(math.isclose(shares[i], even[i]) for i in shares):
        return dict(shares)
    dtype, size = placement.budget.dtype, placement.page_size
    pages = [
        size * store.kv_heads * exact_token_nbytes(store, parts[store.store][0].components, dtype) for store in stores
    ]
    least = [placement.minimum_tokens * store.values_per_token * dtype.itemsize for store in stores]
    counts = whole_pages([shares[s.store] for s in stores], [even[s.store] for s in stores], pages, least, cap)
    held = {store.store: count * page for store, count, page in zip(stores, counts, pages)}
    left = cap - sum(held.values())
    return {store: (nbytes + left * even[store]) / cap for store, nbytes in held.items()}


def whole_pages(
    shares: Sequence[float], even: Sequence[float], pages: Sequence[int], least: Sequence[float], cap: float
) -> list[int]:
    """Pages of each store, of `pages` bytes each: with `shares` of `cap` bytes, as many bytes in all as `even` shares have in whole pages.

    Each is next to its share of that, the largest remainders being rounded up, of equals the first; none is below the whole pages of its
    `least` bytes, where its share holds those.
    """
    total = min(sum(int(share * cap // page) * page for share, page in zip(even, pages)), (1 - MARGIN) * cap)
    sizes = [share * total / page for share, page in zip(shares, pages)]
    bounds = [int(min(low, share * cap) // page) for low, share, page in zip(least, shares, pages)]
    counts = [max(math.floor(size + MARGIN), bound) for size, bound in zip(sizes, bounds)]
    left = total - sum(count * page for count, page in zip(counts, pages))
    for place in sorted(range(len(sizes)), key=lambda i: (counts[i] - sizes[i], i)):
        if pages[place] <= left * (1 + MARGIN):
            counts[place] += 1
            left -= pages[place]
    return counts


__all__ = ["exact_token_nbytes", "shares_in_pages", "whole_pages"]
