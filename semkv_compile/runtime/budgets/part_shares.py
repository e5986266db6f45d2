"""Budgets of rows whose stores are divided into parts: each has its share, none less than the method needs; heads that keep every token
come first."""

from __future__ import annotations

import math
from collections.abc import Mapping

from semkv.errors import BudgetError
from semkv.ir.site import AttentionSite
from semkv.runtime.budgets.budget import bounded_shares
from semkv.runtime.components import Part
from semkv.runtime.placement import Placement

LONG = 1 << 15
"""Tokens of a text at which heads are compared."""


def sharing_parts(placement: Placement) -> list[tuple[AttentionSite, Part]]:
    """(store, part) of those that share what whole heads leave; none where every store is one part."""
    if not _divides(placement):
        return []
    return [
        (store, part) for store in placement.budgeted for part in placement.parts(store) if not part.components.whole
    ]


def _divides(placement: Placement) -> bool:
    _, plan = placement.division
    divided = any(len(parts) > 1 for parts in plan.parts.values())
    return (divided or plan.keeps_whole_heads) and placement.budget.value is not None


def whole_nbytes(placement: Placement, tokens: int) -> float:
    """Device bytes of the heads that keep every token, and of a page that is not full."""
    return (tokens + placement.page_size) * placement.whole_token_nbytes


def part_shares(
    placement: Placement, shares: Mapping[int, float], tokens: int, cap: float
) -> dict[tuple[int, int], float]:
    """Of what whole heads leave of `cap` device bytes, the share of each other part, by (store, first head): in proportion to the stores'
    `shares` and the parts' own, none less than the method needs or more than all `tokens` tokens; what that takes from one goes to the
    others. Where processes share the heads, of this one's parts. Empty where every store is one part.

    Raises
    ------
    BudgetError: whole heads leave too little of the budget; names the smallest that would do.
    """
    if not _divides(placement):
        return {}
    (stores, plan), least = placement.division, placement.minimum_tokens
    sharing = [(store, part) for store in stores for part in plan.parts[store.store] if not part.components.whole]
    sites = [part.site(store) for store, part in sharing]
    token = sum(site.values_per_token for site in sites) * placement.budget.dtype.itemsize
    room = cap - whole_nbytes(placement, tokens)
    if plan.keeps_whole_heads and room < 1.002 * least * token:
        _refuse(placement, whole_nbytes(placement, tokens) + 1.003 * least * token, tokens)
    if not sharing:
        return {}
    weights = [shares[store.store] * part.share for store, part in sharing]
    sizes = bounded_shares(sites, weights, room / token, least, tokens + 2 * placement.page_size)
    parts = [size * site.values_per_token for size, site in zip(sizes, sites)]
    found = {(store.store, part.first): size / sum(parts) for (store, part), size in zip(sharing, parts)}
    return {
        (store.store, part.first): found[store.store, part.of[0]] * (part.last - part.first) / part.of[1]
        if part.of[1]
        else found[store.store, part.first]
        for store, part in sharing_parts(placement)
    }


def head_nbytes(placement: Placement) -> dict[int, tuple[float, ...]]:
    """By store, about the bytes that each KV head of the user's model takes of the budget: of a text of `LONG` tokens, or ten times as long
    as a budget of tokens. Empty where every store is one part, or whole heads leave too little of such a text."""
    value, longest = placement.budget.value, placement.program.max_positions
    tokens = min(10 * value if isinstance(value, int) else LONG, longest or LONG)
    cap = placement.row_cap(tokens)
    try:
        shares = part_shares(placement, {store.store: store.budget_share for store in placement.budgeted}, tokens, cap)
    except BudgetError:
        return {}
    room, found = cap - whole_nbytes(placement, tokens), {}
    for store in placement.budgeted if _divides(placement) else ():
        nbytes = [0.0] * store.kv_heads
        for part in placement.parts(store):
            site, order = part.site(store), store.head_order or range(store.kv_heads)
            whole = tokens * site.values_per_token * placement.budget.dtype.itemsize
            taken = whole if part.components.whole else room * shares[store.store, part.first]
            for place in range(part.first, part.last):
                nbytes[order[place]] = taken / site.kv_heads
        found[store.store] = tuple(nbytes)
    return found


def _refuse(placement: Placement, needed: float, tokens: int) -> None:
    stores, plan = placement.division
    full = sum(placement.budget.full_bytes(store, tokens) for store in stores)
    parts = [part for store in stores for part in plan.parts[store.store]]
    heads = sum(part.last - part.first for part in parts)
    whole = sum(part.last - part.first for part in parts if part.components.whole)
    share = math.ceil(1e3 * needed / full) / 1e3
    hint = (
        f"use a fraction of at least {share:g} at this length" if share <= 1 else "no budget is enough at this length"
    )
    raise BudgetError(
        f"budget {placement.budget.value} is too small for {placement.method!r}: {whole} of {heads} KV heads keep all {tokens} "
        f"tokens, {whole / heads:.1%} of the KV: {hint}, or a mode of the method that keeps no head whole"
    )
