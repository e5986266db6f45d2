"""Heads that take different shares of the memory, dealt to processes so that all hold about as much."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.ir.ranks import Ranks
from semkv.ir.site import AttentionSite
from semkv.passes.dealt_heads import dealt_heads


def store(number: int, heads: int, order: tuple[int, ...] = ()) -> AttentionSite:
    return AttentionSite(number, f"layer{number}", number, 2 * heads, heads, 8, 8, 1.0, head_order=order)


def held(deals, costs, size):
    """Bytes of each process."""
    return [sum(costs[number][head] for number in deals for head in deals[number][rank]) for rank in range(size)]


@given(
    st.integers(2, 3),
    st.integers(0, 2),
    st.lists(st.lists(st.integers(1, 100), min_size=5, max_size=5), min_size=1, max_size=6),
)
def test_each_head_is_once_and_no_exchange_would_help(size, more, rows):
    heads = size + more
    costs = {number: row[:heads] for number, row in enumerate(rows)}
    deals = dealt_heads([store(number, heads) for number in costs], costs, Ranks(0, size, "none"))
    assert set(deals) == {number for number, row in costs.items() if len(set(row)) > 1}
    for deal in deals.values():
        assert sorted(head for own in deal for head in own) == list(range(heads))
        assert [len(own) for own in deal] == [heads * (r + 1) // size - heads * r // size for r in range(size)]
    sums = held(deals, costs, size)
    most = sums.index(max(sums))
    for number, deal in deals.items():
        for rank in set(range(size)) - {most}:
            for own, other in product(deal[most], deal[rank]):
                moved = costs[number][own] - costs[number][other]
                assert max(sums[most] - moved, sums[rank] + moved) >= sums[most]


def test_heads_that_pile_up_in_one_process_are_spread():
    costs = dict.fromkeys(range(4), (9, 9, 1, 1)) | {4: (1, 1, 1, 20), 5: (20, 1, 1, 1)}
    deals = dealt_heads([store(number, 4) for number in costs], costs, Ranks(0, 2, "none"))
    runs = dict.fromkeys(costs, ((0, 1), (2, 3)))
    assert held(runs, costs, 2) == [95, 31]
    assert held(deals, costs, 2) == [63, 63]


def test_costs_are_of_the_models_heads_and_places_of_the_programs():
    (deal,) = dealt_heads([store(0, 3, (2, 0, 1))], {0: (1, 2, 100)}, Ranks(0, 3, "none")).values()
    assert deal == ((0,), (2,), (1,))  # the model's heads 2, 1, 0


@pytest.mark.parametrize(("heads", "costs"), [(4, (3.0,) * 4), (2, (1.0, 2.0)), (4, None)])
def test_what_is_even_or_shared_stays_in_runs(heads, costs):
    costs = {} if costs is None else {0: costs}
    assert dealt_heads([store(0, heads)], costs, Ranks(0, 3, "none")) == {}
