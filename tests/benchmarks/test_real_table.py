"""The long table of a real model: which methods go on, which needle tasks count, and what of kvpress's rows is read."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

import semkv
from semkv.evaluation import Report
from semkv.evaluation.identity import subject_identity
from semkv.evaluation.schema import CellResult, Interval, Recovered
from semkv.evaluation.settings import Cell, Variant
from semkv.profiles.schema import Profile

PROFILE = Path(__file__).parents[2] / "profiles/smollm2_135m"


@pytest.fixture
def scripts():
    """`real_table` and `real_page`."""
    from benchmarks.quality import real_page, real_table

    return real_table, real_page


def interval(value: float, samples: int = 10) -> Interval:
    return Interval(value=value, low=None, high=None, samples=samples, contexts=samples)


def cell(
    label: str, budget: float | None, family: str, value: float, gain: tuple[float, float] | None = None
) -> CellResult:
    """What the table reads of a cell."""
    variant = Variant.model_construct(method=label, budget=budget, label=label, options={})
    recovered = None
    if gain is not None:
        recovered = Recovered(every=interval(gain[0]), far=interval(gain[1]), tokens=10, far_tokens=2)
    where = Cell.model_construct(variant=variant, family=family, length=2048)
    return CellResult.model_construct(cell=where, accuracy=interval(value), recovered=recovered)


def of_method(label: str, budget: float, found: float, gain: tuple[float, float]) -> list[CellResult]:
    needles = [cell(label, budget, name, found) for name in ("niah_single_1", "niah_single_3")]
    return [*needles, cell(label, budget, "perplexity", 0.5, gain)]


def table_of(budget: float) -> list[CellResult]:
    """Methods a to f, the first the best, and `auto`; the third needle task is one that the full cache fails at."""
    full = [cell("full", None, name, value) for name, value in (("niah_single_1", 1.0), ("niah_single_3", 0.2))]
    methods = [("a", 1.0, 1.0), ("b", 0.9, 0.9), ("c", 0.8, 0.8), ("d", 0.7, 0.7), ("auto", 0.1, 0.1)]
    return [*full, *(one for label, found, gain in methods for one in of_method(label, budget, found, (gain, gain)))]


def test_needle_tasks_count_where_the_full_cache_answers_them(scripts):
    table, _ = scripts
    assert table.able(table_of(0.05)) == ("niah_single_1",)


def test_the_best_go_on_and_those_that_are_named(scripts):
    table, _ = scripts
    chosen = table.leaders(table_of(0.05), ["auto"], table.LEADERS)
    assert sorted(v.label for v in chosen) == ["a", "auto", "b", "c"]
    assert {v.budget for v in chosen} == {0.05}


def test_a_standing_is_the_mean_of_needles_and_gains_each_at_most_1(scripts):
    table, _ = scripts
    assert table.standing([1.0, 0.5], [interval(1.4), interval(0.25)]) == pytest.approx((0.75 + 1.0 + 0.25) / 3)
    assert table.standing([], [interval(-2.0), None]) == 0.0
    assert table.standing([], [None, None]) == float("-inf")


def test_methods_that_keep_whole_heads_run_without_and_auto_is_what_the_profile_takes(scripts):
    table, _ = scripts
    strict = table.made("omnikv", 0.05, "omnikv")
    assert strict.options == {"strict": True}
    chosen = table.made("sketch", 0.05, "auto")
    assert (chosen.method, chosen.label, chosen.options) == ("sketch", "auto", {})


def row(press: str, budget: float | None, context: int, **more) -> dict:
    return {"press": press, "budget": budget, "family": "perplexity 2048", "context": context} | more


def test_kvpress_gains_are_between_its_own_full_cache_and_its_own_window(scripts):
    _, page = scripts
    rows = []
    for context in range(3):
        rows += [
            row("full", None, context, nats=[[1.0, 1.0]]),
            row("streaming_llm", 0.05, context, nats=[[3.0, 1.5]]),
            row("snapkv", 0.05, context, nats=[[2.0, 1.5]]),
            {"press": "broken", "error": "TypeError: no"},
        ]
    rows.append(row("snapkv", 0.05, 9, nats=[[9.0, 9.0]]))  # the full cache did not read it
    rows.append(row("snapkv", 0.05, 0, family="niah_single_1 2048", text=["It is 1234567."]))
    rows.append(row("snapkv", 0.05, 0, family="niah_single_1 4096", text=["It is 7."]))
    samples = [{"family": "niah_single_1 2048", "context": 0, "questions": [{"references": ["1234567"]}]}]
    found = {line.label: line for line in page.theirs(rows, samples, 2048) if line.budget == 0.05}
    assert set(found) == {"snapkv", "streaming_llm"}
    assert found["snapkv"].every.value == pytest.approx(3 / 7.5)
    assert found["snapkv"].far.value == pytest.approx(0.5)
    assert (found["snapkv"].texts, found["streaming_llm"].every.value) == (3, 0.0)
    assert found["snapkv"].needles["niah_single_1"].value == 1.0


def test_answers_kept_are_of_as_many_questions_of_the_full_cache(scripts):
    _, page = scripts
    same = {"length": 2048, "budget": 0.1, "package": "semkv", "every": None, "far": None, "texts": 0}
    full = page.Line(
        label="full", needles={"a": interval(1.0, 34), "b": interval(0.8, 34), "c": interval(0.1, 34)}, **same
    )
    mine = page.Line(label="x", needles={"a": interval(0.5, 4), "b": interval(0.4, 4), "c": interval(0.1, 4)}, **same)
    assert mine.kept(("a", "b"), full) == "50"
    assert mine.kept((), full) == "-"


def test_what_was_published_is_not_measured_again(scripts):
    """The most contexts of a cell stay, whichever came first."""
    module, _ = scripts
    few, many, other = (cell("a", 0.05, "niah_single_1", 0.5) for _ in range(3))
    many = many.model_copy(update={"accuracy": many.accuracy.model_copy(update={"contexts": 50, "value": 0.6})})
    other = other.model_copy(update={"cell": other.cell.model_copy(update={"seed": 7})})
    for order in ([few, many, other], [many, few, other]):
        table = module.Table.__new__(module.Table)
        table.cells = {}
        table.take(order)
        assert sorted(one.accuracy.value for one in table.cells.values()) == [0.5, 0.6]


def test_without_a_profile_what_was_published_with_one_stays(scripts, monkeypatch):
    module, _ = scripts
    ours, before = (cell(name, 0.05, "niah_single_1", 0.5) for name in ("quest", "sekv"))
    before = before.model_copy(update={"cell": before.cell.model_copy(update={"subject": "another profile"})})
    ours = ours.model_copy(update={"cell": ours.cell.model_copy(update={"subject": "now"})})
    written: list[Report] = []
    monkeypatch.setattr(module, "write_results", lambda name, report: written.append(report))
    for profile, kept in ((None, ["quest", "sekv"]), (PROFILE, ["quest"])):
        table = module.Table.__new__(module.Table)
        table.asked = argparse.Namespace(model="gemma3", texts=None, profile=profile)
        table.loaded = argparse.Namespace(profile=None if profile is None else Profile.load(PROFILE))
        table.cells, table.commits, table.notes = {}, set(), ["texts: others", "profile: sketch"]
        table._identities = dict.fromkeys(module.GROUPS, "now")
        table.report = Report.model_construct(cells=[], summaries=[], commits=[], notes=[])
        table.take([ours, before])
        table.publish()
        report = written.pop()
        assert sorted(c.cell.variant.label for c in report.cells) == kept
        texts, sections = report.notes
        assert texts != "texts: others"
        assert sections.startswith("profile: ")
        assert (sections == "profile: sketch") == (profile is None), (
            "of what was published, or of the profile's sections"
        )


def test_rows_stay_when_what_their_methods_do_not_read_is_learned_again(scripts):
    """A row is of the model, the profile and the settings: of the profile each group has what its methods read."""
    module, _ = scripts
    model, _ = semkv.bundled.load()
    whole = semkv.bundled.profile()
    found: dict[str, list[str]] = {}
    learned = whole.info.sketch.model_copy(update={"share": 0.5})
    for profile in (
        whole,
        module.only_sketch(whole),
        replace(whole, info=whole.info.model_copy(update={"sketch": learned})),
    ):
        table = module.Table.__new__(module.Table)
        table.loaded = argparse.Namespace(profile=profile)
        for group in module.GROUPS:
            identity = subject_identity(model, table.profile(group), None)
            found.setdefault(group, []).append(identity)
    same = {group: (one == other, one == codes) for group, (one, other, codes) in found.items()}
    assert same == {"plain": (True, True), "profile": (False, True), "codes": (True, False), "whole": (False, False)}


def test_methods_that_read_a_profile_are_refused_without_one(scripts, monkeypatch, capsys):
    module, _ = scripts
    monkeypatch.setattr("sys.argv", ["real_table.py", "gemma3", "--methods", "quest,sekv"])
    with pytest.raises(SystemExit):
        module.main()
    assert "--methods sekv: expected --profile, or some of full, " in capsys.readouterr().err
