"""Recovered gain: against a loop over tokens, between the window's 0 and the full cache's 1, and only where all three were measured."""

from __future__ import annotations

import random

import pytest

from semkv.evaluation.gain import FAR_NATS, gain_change, recovered
from semkv.evaluation.schema import Answer, Row, Usage

USAGE = Usage(device=1, full=2, budget_used=0.5, workspace=0, host=0, disk=0, reserved=0, window=0, moved=0.0, steps=1)


def rows_of(nats: dict[int, list[float] | None]) -> list[Row]:
    """One row per context with the negative log-likelihoods of its tokens."""
    return [
        Row(
            cell="c",
            context=context,
            commit="0",
            answers=[
                Answer(
                    depth=None,
                    correct=False,
                    matched=0,
                    expected=len(given or [0]),
                    nats=sum(given or [1.0]),
                    token_nats=given,
                )
            ],
            usage=USAGE,
            step_us=[1.0],
            prompt_tokens=10,
        )
        for context, given in nats.items()
    ]


def drawn(seed: int, contexts: int = 6, tokens: int = 40) -> tuple[dict[int, list[float]], ...]:
    """Full, window and a method in between, with tokens of which the window knows as much, or more."""
    rng = random.Random(seed)
    full = {c: [rng.expovariate(0.5) for _ in range(tokens)] for c in range(contexts)}
    gains = {c: [rng.choice([0.0, -0.1, 0.3, 2.5]) for _ in range(tokens)] for c in full}
    window = {c: [a + b for a, b in zip(full[c], gains[c])] for c in full}
    method = {c: [a + rng.uniform(0, 1) * b for a, b in zip(full[c], gains[c])] for c in full}
    return full, window, method


@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_ratio_of_summed_gains(seed):
    full, window, method = drawn(seed)
    found = recovered(*(rows_of(x) for x in (method, full, window)))
    mine = whole = far_mine = far_whole = 0.0
    far = 0
    for context in full:
        for m, f, w in zip(method[context], full[context], window[context]):
            mine, whole = mine + w - m, whole + w - f
            if w - f > FAR_NATS:
                far_mine, far_whole, far = far_mine + w - m, far_whole + w - f, far + 1
    assert found.every.value == pytest.approx(mine / whole)
    assert found.far.value == pytest.approx(far_mine / far_whole)
    assert (found.tokens, found.far_tokens) == (240, far)
    assert found.every.low < found.every.value < found.every.high
    assert found.every.contexts == 6


def test_the_full_cache_is_1_and_the_window_0():
    full, window, _ = drawn(2)
    for method, expected in ((full, 1.0), (window, 0.0)):
        found = recovered(*(rows_of(x) for x in (method, full, window)))
        assert found.every.value == pytest.approx(expected)
        assert found.far.value == pytest.approx(expected)


def test_only_contexts_that_all_three_read_count():
    full, window, method = drawn(3)
    some = {c: method[c] for c in (1, 4)}
    found = recovered(rows_of(some), rows_of(full), rows_of({c: window[c] for c in (0, 4, 5)}))
    alone = recovered(*(rows_of({4: x[4]}) for x in (method, full, window)))
    assert found.tokens == 40
    assert found.every.value == alone.every.value
    assert found.every.low is None  # one context has no interval


def test_there_is_none_without_a_window_without_tokens_and_without_a_gain():
    full, window, method = drawn(4)
    assert recovered(rows_of(method), rows_of(full), []) is None
    assert recovered(rows_of(method), [], rows_of(window)) is None
    assert recovered(rows_of(dict.fromkeys(method)), rows_of(full), rows_of(window)) is None
    assert recovered(rows_of(method), rows_of(window), rows_of(full)) is None  # the context takes away


def test_without_far_tokens_there_is_no_share_of_them():
    full = {0: [1.0, 2.0], 1: [0.5, 0.5]}
    window = {c: [x + 0.4 for x in given] for c, given in full.items()}
    found = recovered(rows_of(full), rows_of(full), rows_of(window))
    assert (found.far, found.far_tokens, found.every.value) == (None, 0, pytest.approx(1.0))


def test_a_change_of_gain_is_of_the_tokens_that_both_predicted():
    full, window, method = drawn(5)
    other = {c: [a + 0.5 * (b - a) for a, b in zip(full[c], window[c])] for c in (0, 1, 2, 4)}
    change = gain_change(*(rows_of(x) for x in (method, other, full, window)))
    shared = [{c: given[c] for c in other} for given in (method, other, full, window)]
    mine, theirs = (recovered(*(rows_of(x) for x in (side, *shared[2:]))) for side in shared[:2])
    assert change.value == pytest.approx(mine.every.value - theirs.every.value)
    assert (change.contexts, change.low < change.value < change.high) == (4, True)
    far = gain_change(*(rows_of(x) for x in (method, other, full, window)), far=True)
    assert far.value == pytest.approx(mine.far.value - theirs.far.value)
    assert far.samples < change.samples


def test_a_method_does_not_change_against_itself_and_nothing_is_said_where_nothing_is_shared():
    full, window, method = drawn(6)
    assert gain_change(*(rows_of(x) for x in (method, method, full, window))).value == 0.0
    apart = {9: method[0]}
    assert gain_change(rows_of(method), rows_of(apart), rows_of(full), rows_of(window)) is None
    assert gain_change(rows_of(method), [], rows_of(full), rows_of(window)) is None
    assert gain_change(rows_of(method), rows_of(method), rows_of(window), rows_of(full)) is None
