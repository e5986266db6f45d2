"""The table of the five systems: every option exists, every sentence compares what is measured, and changes are of the same texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv.methods import find_method

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def systems(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import systems

    return systems


def test_every_variant_is_one_that_its_method_takes_and_has_a_label_of_its_own(systems):
    made = systems.variants()
    for variant in made:
        find_method(variant.method, variant.options)
    assert len({(v.label, v.budget) for v in made}) == len(made)
    assert {v.method for v in made} > {"sekv", "heterocache", "sentencekv", "compresskv", "specontext", "h2o", "quest"}


@pytest.mark.parametrize("question", ["unseen", "seen"])
def test_both_sides_of_every_sentence_are_measured_at_its_budgets_in_its_mode(systems, question):
    measured = {(v.label, v.budget) for v in systems.variants(question)}
    said = [one for own in systems.SAID.values() for one in own if one.question == question]
    assert said
    for one in said:
        for budget in one.budgets:
            assert {(one.label, budget), (one.base, budget)} <= measured, one
        assert one.label != one.base


def test_a_mode_asks_no_switch_that_nothing_is_said_of(systems):
    seen, unseen = ({v.label for v in systems.variants(mode)} for mode in ("seen", "unseen"))
    assert set(systems.MODES) <= seen & unseen
    assert "sentencekv, equal chunks" in unseen - seen
    assert "compresskv, paper, uniform" in seen - unseen


def test_every_paper_has_its_ablations_and_its_order(systems):
    assert set(systems.SAID) == set(systems.SWITCHED_LINES)
    for own in systems.SAID.values():
        assert any(one.budgets == systems.BUDGETS for one in own)
        assert any(one.budgets != systems.BUDGETS for one in own)


def test_a_change_says_what_it_is_and_whether_the_paper_is_right(systems):
    lower = {"value": -0.2, "low": -0.3, "high": -0.1, "samples": 40, "contexts": 10}
    found = {
        "label": "a",
        "base": "b",
        "way": "lower",
        "text": "less",
        "budget": 0.1,
        "answers": lower,
        "gain": lower | {"high": 0.1},
    }
    table = systems.said_table([found, found | {"answers": None, "gain": None}])
    assert "| `a` | `b` | 10 % | less | lower | -20.0 (-30 to -10): seen | -20.0 (-30 to +10): open |" in table
    assert table.count("`a`") == 1
