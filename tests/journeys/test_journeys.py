"""Every journey gives in full what the model itself gives, and at 10 % of the KV it comes to its end within its budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from journey import BUDGET, Journey, all_journeys, difference


def journeys(quick: Callable[[Journey], bool]) -> list:
    """All journeys; those that are not `quick` run with the slow tests."""
    return [
        pytest.param(one, id=one.name, marks=[] if quick(one) else [pytest.mark.slow])
        for one in all_journeys().values()
    ]


def first_of_its_method() -> Callable[[Journey], bool]:
    """Whether a journey is the first that runs with its method, of those that neither take long nor want the process for themselves."""
    seen: dict[str, str] = {}

    def quick(one: Journey) -> bool:
        return not (one.slow or one.alone) and seen.setdefault(one.method, one.name) == one.name

    return quick


@pytest.fixture(scope="session")
def expected(bundled, tmp_path_factory):
    """`expected(journey)`: what the model itself makes of it."""
    from journey import Desk

    made: dict[str, object] = {}

    def of(one: Journey) -> object:
        if one.name not in made:
            made[one.name] = one.expected(bundled[0], Desk(*bundled, tmp_path_factory.mktemp("plain")))
        return made[one.name]

    return of


@pytest.mark.parametrize("one", journeys(lambda one: not one.slow))
def test_in_full_it_is_the_plain_models(one, compiled_by, desk, expected):
    assert difference(one.run(compiled_by("full"), desk()), expected(one)) is None


@pytest.mark.parametrize("one", journeys(first_of_its_method()))
def test_at_ten_percent_it_ends_well(one, compiled_by, desk, expected):
    """With the model's answers where the method finds them; else twice with the same."""
    compiled = compiled_by(one.method)
    got = one.run(compiled, desk(one.method, BUDGET))
    if one.same:
        assert difference(got, expected(one)) is None
    else:
        assert difference(one.run(compiled, desk(one.method, BUDGET)), got) is None


def test_there_are_enough_journeys_of_enough_methods():
    journeys = all_journeys().values()
    assert len(journeys) >= 25
    assert len({one.method for one in journeys}) >= 12
    assert sum(one.same for one in journeys) >= 10
    assert sum(one.alone for one in journeys) <= len(journeys) // 4


@pytest.mark.parametrize(
    "name", ["chat_passing_new_tokens_alone", "batch_padded_on_the_left", "whole_sequences_with_labels", "guidance"]
)
def test_another_model_is_told_apart(name, compiled_by, desk, bundled, expected):
    """The control: one weight is another, and the comparison fails."""
    one = all_journeys()[name]
    head = bundled[0].lm_head.weight
    kept = head.detach().clone()
    try:
        with torch.no_grad():
            head.copy_(kept.roll(1, 0))
        changed = one.expected(bundled[0], desk())
    finally:
        with torch.no_grad():
            head.copy_(kept)
    assert difference(changed, expected(one)) is not None


def test_what_differs_is_named():
    assert difference([1, [2.0, "a"]], [1, [2.0, "a"]]) is None
    assert difference([1, [2.0005]], [1, [2.0]]) is None
    assert difference([1, [2.01]], [1, [2.0]]) == "result[1][0]: 2.01, expected 2.0"
    assert difference([[1, 2]], [[1, 2, 3]]) == "result[0]: [1, 2], expected [1, 2, 3]"
    assert difference(["a"], ["b"]) == "result[0]: 'a', expected 'b'"
    assert difference([1], [1.0]) == "result[0]: 1, expected 1.0"
