"""The table of the five systems: every option exists, every sentence compares what is measured, and changes are of the same texts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.schema import CellResult, Interval, Recovered, Summary
from semkv.evaluation.settings import Cell
from semkv.methods import find_method


@pytest.fixture
def systems():
    from benchmarks.quality import systems

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


@pytest.mark.parametrize("question", ["unseen", "seen"])
def test_modes_may_be_measured_without_switches(systems, question):
    made = systems.variants(question, asked=(0.1, 0.5), modes=True)
    assert [(v.label, v.budget) for v in made] == [
        ("full", None),
        *((label, budget) for label in systems.MODES for budget in (0.1, 0.5)),
    ]


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
    same = found | {"way": "equal", "answers": lower | {"value": 0.0, "low": 0.0, "high": 0.0}}
    assert "equal | +0.0 (+0 to +0): open |" in systems.said_table([same])
    assert systems.said_table([]) == "Not measured yet, or refused at the budgets above."


def test_a_budget_alone_is_a_part_of_the_whole(systems):
    whole = systems.variants("unseen")
    apart = [v for budget in systems.BUDGETS for v in systems.variants("unseen", asked=(budget,)) if v.budget]
    assert {(v.label, v.budget) for v in apart} == {(v.label, v.budget) for v in whole if v.budget}
    grid = Grid(variants=whole, families=("perplexity",), lengths=(2048,), samples=2)
    assert [v.label for v in systems.at(grid, 0.05).variants] == ["full", *systems.MODES]


def test_what_is_measured_again_takes_the_place_of_its_budgets(systems):
    """Of the others everything stays, in the order of the sentences."""
    now = systems.Systems.__new__(systems.Systems)
    summary = Summary.model_construct(variant=Variant.model_construct(label="cake"), ahead={"sekv": None})
    new = Report.model_construct(title="new", cells=[], summaries=[summary])
    now.budgets, now.reports = (0.05,), {systems.part(0.05, "text"): new}
    now.bench = SimpleNamespace(refused={"omnikv, strict at 5 %": "too small"})
    first, *_, last = [(system, one) for system, said in systems.SAID.items() for one in said]

    def change(of, budget, answers):
        system, one = of
        return {"system": system, "label": one.label, "base": one.base, "budget": budget, "answers": answers}

    now.changes = lambda: [change(first, 0.05, "new")]
    before = {
        "reports": {systems.part(0.05, "text"): "old", systems.part(0.5, "text"): "old"},
        "changes": [change(first, 0.05, "old"), change(last, 0.1, "old"), change(first, 0.1, "old")],
        "refused": {"cake at 5 %": "was", "cake at 50 %": "stays"},
    }
    found = systems.merged(before, now)
    assert set(found["reports"]) == {"text 0.05", "text 0.5"}
    assert found["reports"]["text 0.5"] == "old"
    assert found["reports"]["text 0.05"].title == "new"
    assert found["reports"]["text 0.05"].summaries[0].ahead == {}  # the changes say what is compared
    assert found["changes"] == [change(first, 0.05, "new"), change(first, 0.1, "old"), change(last, 0.1, "old")]
    assert found["refused"] == {"cake at 50 %": "stays", "omnikv, strict at 5 %": "too small"}
    assert systems.merged({}, now)["changes"] == [change(first, 0.05, "new")]


def test_the_page_says_what_is_not_measured_yet(systems, monkeypatch):
    """Reports of one budget make a page."""

    def interval(value):
        return Interval(value=value, low=value - 0.1, high=value + 0.1, samples=16, contexts=16)

    def report(family, methods):
        cells, summaries = [], []
        for label, value in methods:
            variant = Variant.model_construct(method=label, budget=None if label == "full" else 0.5, label=label)
            gain = Recovered(every=interval(value), far=interval(value), tokens=10, far_tokens=2)
            where = Cell.model_construct(variant=variant, family=family, length=2048)
            usage = SimpleNamespace(excess_share=0.02)
            cells.append(CellResult.model_construct(cell=where, accuracy=interval(value), recovered=gain, usage=usage))
            summaries.append(Summary.model_construct(variant=variant, length=2048, accuracy=interval(value), ahead={}))
        return Report.model_construct(cells=cells, summaries=summaries)

    methods = [("full", 1.0), ("sekv", 0.4), ("sketch", 0.9)]
    content = {
        "reports": {
            systems.part(0.5, name): report(family, methods)
            for name, family in (("text", "perplexity"), ("unseen", "niah_single_1"), ("seen", "niah_single_1"))
        },
        "changes": [],
        "refused": {"cake at 50 %": "fewer tokens than the method needs"},
    }
    monkeypatch.setattr(systems, "read_parts", lambda name: content)
    monkeypatch.setattr(systems, "provenance_of", lambda *reports: "measured here")
    written = []
    monkeypatch.setattr(systems, "write_document", lambda *parts: written.append(parts))
    systems.write_page("systems_model", "a model")
    text = "\n".join(written[0])
    assert "Not measured yet: 5 %, 10 %, 20 %." in text
    assert "## Left out\n- cake at 50 %: fewer tokens than the method needs" in text
    assert systems.SAME not in text
    change = {
        "system": "SeKV",
        "label": "sekv",
        "base": "sketch",
        "budget": 0.5,
        "way": "lower",
        "text": "",
        "answers": None,
    }
    for high, said in ((0.0, True), (0.1, False)):
        content["changes"] = [change | {"gain": {"value": 0.0, "low": 0.0, "high": high, "samples": 1, "contexts": 1}}]
        systems.write_page("systems_model", "a model")
        assert (systems.SAME in "\n".join(written[-1])) == said
    assert text.index("`sketch`") < text.index("`sekv`")
    assert "### 50 %" in text
    assert "### 10 %" not in text
