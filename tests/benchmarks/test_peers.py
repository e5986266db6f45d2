"""The comparison with kvpress: the same samples on both sides, rows read back, the control, paired differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semkv import bundled
from semkv.evaluation.runner import cell_of, plan_of
from semkv.evaluation.tasks.bundled import family_tasks

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts():
    """`setting`, `export_samples`, `compare` and `quality`."""
    from benchmarks.peers import compare, export_samples, setting
    from benchmarks.quality import quality

    return setting, export_samples, compare, quality


def test_both_sides_get_the_questions_of_our_grid(scripts):
    setting, export, _, _ = scripts
    cells = setting.grid().model_copy(update={"lengths": (300,), "samples": 6})
    _, tokenizer = bundled.load()
    found = export.samples(tokenizer, cells)
    assert [(one["family"], one["context"]) for one in found] == [(f, i) for i in range(2) for f in cells.families]
    for one in found:
        task = family_tasks()[one["family"]]
        plan = plan_of(cells, task)
        sample = task.make(tokenizer, 300, one["context"], seed=cells.seed, questions=plan.per_context)
        assert one["ids"] == sample.ids
        asked = [(q["ids"], q["answer"]) for q in one["questions"]]
        assert asked == [(q.ids, q.answer) for q in sample.questions[: plan.asked(one["context"])]]
    assert [len(one["questions"]) for one in found] == [4] * 4 + [2] * 4


def test_our_rows_are_the_first_of_the_quality_grid(scripts):
    setting, _, _, quality = scripts
    ours, published = setting.grid(), quality.grids(None, 4096)[0]

    def key(grid, method, budget):
        variant = next(v for v in grid.variants if (v.label, v.budget) == (method, budget))
        return cell_of(grid, "x", variant, "dense", 4096, "unseen").key

    assert ours.contexts == 25
    for method, budget in (("full", None), ("snapkv", 0.05), ("sekv", 0.1)):
        assert key(ours, method, budget) == key(published, method, budget)


def row(press: str, budget: float | None, context: int, matched: list[int], family: str = "single") -> dict:
    return {
        "press": press,
        "budget": budget,
        "family": family,
        "context": context,
        "matched": matched,
        "expected": [3, 3],
        "cached": 1.0,
        "attended": 0.03 + context / 1000,
        "seconds": 0.1,
    }


def test_rows_of_kvpress_are_read_with_their_failures(scripts, tmp_path):
    _, _, compare, _ = scripts
    lines = [row("full", None, 0, [3, 3]), row("snapkv", 0.03, 0, [3, 1]), row("snapkv", 0.03, 1, [0, 3])]
    lines.append({"press": "duo_attention", "error": "AssertionError: Checkpoint model not in [...]"})
    path = tmp_path / "kvpress.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    measured, failed = compare.their_rows(path)
    assert failed == {"duo_attention": "AssertionError"}
    one = compare.find(measured, "kvpress", "snapkv", 0.03)
    assert one.matched == {("single", 0, 0): 3, ("single", 0, 1): 1, ("single", 1, 0): 0, ("single", 1, 1): 3}
    assert list(one.right.values()) == [True, False, False, True]
    assert (one.attended, one.share().value) == (0.031, 0.5)
    assert compare.find(measured, "kvpress", "snapkv", 0.05) is None


def measured(compare, side: str, name: str, budget: float | None, matched: dict) -> object:
    return compare.Measured(side, name, budget, dict(matched), {place: n == 3 for place, n in matched.items()})


def test_nothing_is_compared_where_the_full_cache_answers_differently(scripts):
    _, _, compare, _ = scripts
    ours = {("single", i, j): 3 for i in range(3) for j in range(2)}
    theirs = {place: n for place, n in ours.items() if place[1] < 2} | {("dense", 0, 0): 1}
    full = [measured(compare, "semkv", "full", None, ours), measured(compare, "kvpress", "full", None, theirs)]
    assert "to each of the 4 questions that both were asked, and answer 100 (" in compare.control(full)
    full[1].matched["single", 1, 1] = 2
    with pytest.raises(SystemExit, match="the two sides answer 1 of 4 questions differently"):
        compare.control(full)
    with pytest.raises(SystemExit, match="not measured on both sides"):
        compare.control(full[:1])


def test_a_difference_is_of_the_same_questions_averaged_over_families(scripts):
    _, _, compare, _ = scripts
    ours = {("single", i, j): 3 for i in range(4) for j in range(2)} | {("dense", i, 0): 0 for i in range(3)}
    theirs = {("single", i, j): 3 * (i > 0) for i in range(4) for j in range(2)} | {
        ("dense", i, 0): 0 for i in range(9)
    }
    one, other = measured(compare, "semkv", "a", 0.1, ours), measured(compare, "kvpress", "b", 0.1, theirs)
    found = compare.difference(one, other)
    assert found.value == pytest.approx((2 / 8 + 0) / 2)
    assert found.samples == 11
    assert found.low < found.value < found.high


def test_the_best_stand_first(scripts):
    _, _, compare, _ = scripts
    good = measured(compare, "semkv", "good", 0.1, {("single", i, 0): 3 for i in range(3)})
    bad = measured(compare, "kvpress", "bad", 0.1, {("single", i, 0): 0 for i in range(3)})
    other = measured(compare, "kvpress", "elsewhere", 0.05, {("single", i, 0): 3 for i in range(3)})
    lines = compare.shares_table([bad, other, good], 0.1, ("single",)).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["good", "bad"]


def test_every_pair_names_methods_that_are_measured(scripts):
    setting, _, compare, _ = scripts
    labels = {variant.label for variant in setting.grid().variants}
    assert {ours for ours, _ in compare.PAIRS} <= labels
    presses = (FOLDER / "peers" / "presses.py").read_text(encoding="utf-8")
    assert [theirs for _, theirs in compare.PAIRS if f'    "{theirs}": lambda' not in presses] == []
