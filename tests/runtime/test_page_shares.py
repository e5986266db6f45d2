"""Layers with uneven shares hold whole pages, as many in all as with even shares."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.profiles.schema.allocation import layer_budgets
from semkv.runtime.budgets.budget import bounded_shares
from semkv.runtime.budgets.page_shares import whole_pages

DIMS = (16, 64, 128)


class Store:
    """What `bounded_shares` reads of a site."""

    def __init__(self, values_per_token: int) -> None:
        self.values_per_token = values_per_token


@given(
    errors=st.lists(st.floats(0, 1), min_size=1, max_size=48),
    budget=st.integers(24, 3000),
    dim=st.sampled_from(DIMS),
    heads=st.integers(1, 8),
    page=st.sampled_from([1, 8, 16]),
    minimum=st.sampled_from([8, 32, 64]),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_layers_by_error_hold_what_even_layers_do(errors, budget, dim, heads, page, minimum):
    """Alg. 1 in tokens, then pages: the total is the uniform one, each layer is next to its part of it, and twice is the same."""
    layers, floor = len(errors), -(-24 // page) * page
    budget = max(budget, floor)
    tokens = layer_budgets(errors, budget * layers, minimum=minimum, scale_minimum=True)
    assert sum(tokens) == budget * layers
    stores = [Store(2 * dim * heads)] * layers
    shares = bounded_shares(stores, [size / sum(tokens) for size in tokens], budget, floor, 10**6)
    token, held = 2 * 2 * dim * heads, heads * (2 * 2 * dim + 4)
    cap, even = layers * budget * token, [1 / layers] * layers
    least = [floor * token] * layers
    counts = whole_pages(shares, even, [page * held] * layers, least, cap)
    assert counts == whole_pages(shares, even, [page * held] * layers, least, cap)
    uniform = layers * (budget * token // (page * held))
    assert sum(counts) * page * held <= cap
    smallest = floor * token // (page * held)
    assert min(counts) >= smallest
    raised = any(share * uniform < smallest for share in shares)
    exact = budget * token % (page * held) == 0  # then a page is left free, as a share is rounded
    assert raised or uniform - exact <= sum(counts) <= uniform
    assert raised or all(abs(count - share * uniform) < 1 + 1e-3 for count, share in zip(counts, shares))
    assert abs(sum(counts) - uniform) <= layers


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=12),
    sizes=st.lists(st.integers(1, 8), min_size=12, max_size=12),
    budget=st.integers(64, 900),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_stores_of_different_sizes_stay_within_a_page_of_the_even_total(weights, sizes, budget):
    sizes = sizes[: len(weights)]
    token = [256 * heads for heads in sizes]
    pages = [8 * 264 * heads for heads in sizes]
    even = [own / sum(token) for own in token]
    wanted = [weight * own for weight, own in zip(weights, token)]
    shares = [want / sum(wanted) for want in wanted]
    cap = budget * sum(token)
    counts = whole_pages(shares, even, pages, [0] * len(pages), cap)
    held = sum(count * page for count, page in zip(counts, pages))
    uniform = sum(int(share * cap // page) * page for share, page in zip(even, pages))
    assert held <= cap
    assert uniform - max(pages) * len(pages) < held <= uniform


@pytest.mark.parametrize(
    ("shares", "cap", "expected"),
    [
        ((0.5, 0.5), 100.0, [5, 4]),  # exactly full: a page stays free, so that rounding takes none
        ((0.5, 0.5), 109.0, [5, 5]),
        ((0.75, 0.25), 109.0, [8, 2]),  # 7.5 and 2.5 of 10: of equal remainders the first
        ((0.7, 0.3), 109.0, [7, 3]),
        ((0.92, 0.08), 109.0, [9, 1]),
    ],
)
def test_largest_remainders_are_rounded_up(shares, cap, expected):
    assert whole_pages(shares, (0.5, 0.5), (10, 10), (0, 0), cap) == expected


def test_no_layer_falls_below_its_smallest_budget():
    """Scaled to the total of even shares, 2.4 pages would be 1.9."""
    counts = whole_pages((0.24, 0.76), (0.5, 0.5), (10, 10), (24, 24), 100.0 - 1e-3)
    assert counts[0] == 2


@pytest.mark.parametrize(("method", "options"), [("pyramidkv", {"beta": 6.0}), ("cake", {})])
@pytest.mark.parametrize("budget", [0.21, 78])
def test_memories_hold_as_much_as_with_even_shares(wide_program, compile_as, prompt, method, options, budget):
    held, full = {}, {}
    for name, own in ((method, options), ("snapkv", {})):
        compiled = compile_as(wide_program, name, budget, options=own, kv_dtype="float16", page_size=8)
        state = compiled.prefill(prompt(600))
        stores = [state.rows[0].stores[store.store][0] for store in compiled.placement.budgeted]
        held[name] = [memory.kept.length + memory.recent.length for memory in stores]
        shares = state.rows[0].shares
        assert sum(shares.values()) == pytest.approx(1)
        for at in range(40):
            compiled.extend(state, prompt(1, seed=at))
        assert state.stats.peak_share <= 1
        full[name] = state.stats.device_share_mean
    assert full[method] == pytest.approx(full["snapkv"], rel=0.02)
    assert sum(held[method]) == sum(held["snapkv"])
    assert method == "cake" or len(set(held[method])) > 1  # whose layers differ little here
    assert len(set(held["snapkv"])) == 1
    assert all(size % 8 == 0 for sizes in held.values() for size in sizes)


def test_even_shares_stay_as_they_are(wide_program, compile_as, prompt):
    state = compile_as(wide_program, "snapkv", 0.21, kv_dtype="float16").prefill(prompt(600))
    assert list(state.rows[0].shares.values()) == [0.5, 0.5]
    assert math.isclose(sum(state.rows[0].shares.values()), 1)
    assert state.logits.dtype == torch.float32
