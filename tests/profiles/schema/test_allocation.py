"""Budgets per head (HeteroCache Eq. 7-8) and per layer (CompressKV Alg. 1) against naive references, for any scores."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.errors import BudgetError
from semkv.profiles.schema.allocation import STABILITY_FLOOR, head_budgets, layer_budgets

scores = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def naive_head_sizes(stability, total, length):
    """The real sizes clamp(c / stability, 1, length) whose sum is `total`, by bisection on c."""
    weights = [1 / max(value, STABILITY_FLOOR) for value in stability]
    low, high = 0.0, length / min(weights)
    for _ in range(200):
        middle = (low + high) / 2
        reached = sum(min(max(middle * weight, 1), length) for weight in weights)
        low, high = (middle, high) if reached < total else (low, middle)
    return [min(max(high * weight, 1), length) for weight in weights]


@settings(max_examples=300, deadline=None)
@given(scores, st.integers(0, 6), st.floats(0.05, 1), st.integers(1, 400))
def test_head_budgets_are_the_naive_ones(stability, full, budget, length):
    heads = len(stability) + full
    total = min(int((budget * heads - full) * length + 1e-6), len(stability) * length)
    if total < len(stability):
        with pytest.raises(BudgetError, match=r"the smallest budget is"):
            head_budgets(stability, full, budget, length)
        return
    sizes = head_budgets(stability, full, budget, length)
    assert sum(sizes) == total
    assert all(1 <= size <= length for size in sizes)
    for size, naive in zip(sizes, naive_head_sizes(stability, total, length)):
        assert abs(size - naive) <= 1 + 1e-4 * naive


def test_eq_8_as_it_stands_where_nothing_is_clamped():
    # rho 0.5 of 8 heads at 1000 tokens, 2 full: L_base = (4 - 2) * 1000 / 6; shares 1/S over the sum of 1/S.
    stability = [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    sizes = head_budgets(stability, 2, 0.5, 1000)
    assert sizes == [222, 222, 222, 445, 445, 444]
    weights = [1 / value for value in stability]
    for size, weight in zip(sizes, weights):
        assert size == pytest.approx(2000 * weight / sum(weights), abs=1)


def test_what_a_clamped_head_cannot_take_goes_to_the_others():
    assert head_budgets([0.01, 0.5, 0.5], 0, 0.5, 100) == [100, 25, 25]


def test_the_smallest_budget_is_named_and_enough():
    with pytest.raises(
        BudgetError, match=r"8 of 32 heads keep all tokens, 25\.0% of the KV; the smallest budget is 0\.2508"
    ):
        head_budgets([0.5] * 24, 8, 0.25, 1000)
    assert head_budgets([0.5] * 24, 8, 0.2508, 1000) == [2] + [1] * 23


def test_heads_that_all_stay_whole():
    assert head_budgets([], 4, 1.0, 10) == []
    with pytest.raises(BudgetError, match=r"all 4 heads keep every token, so that the smallest budget is 1"):
        head_budgets([], 4, 0.5, 10)


@pytest.mark.parametrize(
    ("budget", "length", "message"),
    [(0, 10, r"budget is 0, expected"), (1.5, 10, r"budget is 1\.5"), (0.5, 0, r"length is 0, expected")],
)
def test_values_out_of_range_are_named(budget, length, message):
    with pytest.raises(BudgetError, match=message):
        head_budgets([0.5], 0, budget, length)


def naive_layer_budgets(errors, total, minimum, maximum):
    """Alg. 1 line by line."""
    scale = sum(errors)
    shares = [error / scale if scale > 0 else 1 / len(errors) for error in errors]
    rest = total - minimum * len(errors)
    sizes = [min(max(minimum + round(share * rest), minimum), maximum) for share in shares]
    left = total - sum(sizes)
    while left != 0:
        if left > 0:
            open_layers = [i for i, size in enumerate(sizes) if size < maximum]
            if not open_layers:
                break
            sizes[max(open_layers, key=lambda i: shares[i])] += 1
            left -= 1
        else:
            open_layers = [i for i, size in enumerate(sizes) if size > minimum]
            if not open_layers:
                break
            sizes[min(open_layers, key=lambda i: shares[i])] -= 1
            left += 1
    return sizes


@settings(max_examples=300, deadline=None)
@given(scores, st.integers(0, 40), st.integers(0, 200), st.floats(0, 1))
def test_layer_budgets_are_the_naive_ones(errors, minimum, width, place):
    maximum = minimum + width
    total = round(len(errors) * (minimum + place * width))
    if total < 1:
        return
    sizes = layer_budgets(errors, total, minimum=minimum, maximum=maximum)
    assert sum(sizes) == total
    assert all(minimum <= size <= maximum for size in sizes)
    assert sizes == naive_layer_budgets(errors, total, minimum, maximum)


@settings(max_examples=200, deadline=None)
@given(scores, st.integers(1, 5000))
def test_a_scaled_minimum_always_fits(errors, total):
    sizes = layer_budgets(errors, total, scale_minimum=True)
    assert sum(sizes) == total
    assert max(sizes) <= max(32, -(-3 * total // len(errors)))
    if total >= 32 * len(errors):
        assert min(sizes) >= 32


@pytest.mark.parametrize(
    ("errors", "total", "options", "message"),
    [
        (
            [1, 1],
            63,
            {},
            r"63 tokens are too few for 2 layers of at least 32: give at least 64 tokens, or a minimum of at most 31",
        ),
        (
            [1, 1],
            300,
            {"maximum": 100},
            r"300 tokens do not fit into 2 layers of 32 to 100: give at most 200 .* at least 150",
        ),
        ([1, -1], 100, {}, r"errors holds -1, expected finite numbers of at least 0"),
        ([1, float("nan")], 100, {}, r"errors holds nan"),
        ([], 100, {}, r"errors is empty"),
    ],
)
def test_budgets_that_cannot_be_met_say_what_would(errors, total, options, message):
    with pytest.raises(BudgetError, match=message):
        layer_budgets(errors, total, **options)
