"""The tables that the quality and ablation benchmarks write, from reports built by hand."""

import json

import pytest

from benchmarks.lib import grids
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.environment import describe, now
from semkv.evaluation.report import build_report
from semkv.evaluation.runner import cell_of
from semkv.evaluation.schema import Answer, Row, Usage
from semkv.evaluation.store import RowStore
from semkv.evaluation.tables import markdown

USAGE = Usage(
    device=10, full=100, budget_used=0.9, workspace=0, host=50, disk=0, reserved=0, window=0, moved=5.0, steps=5
)


def report_of(grid: Grid, right: dict[str, list[int]]) -> Report:
    """A report in which each variant (by label) answers, of every ten questions, those listed in `right`."""
    store = RowStore(None)
    for variant in grid.variants:
        for family in grid.families:
            key = cell_of(grid, "x", variant, family, grid.lengths[0], "unseen").key
            for index in range(grid.contexts):
                places = [index * grid.questions_per_context + i for i in range(grid.asked(index))]
                answers = [
                    Answer(depth=0.5, correct=place % 10 in right[variant.label], matched=0, expected=3)
                    for place in places
                ]
                store.add(
                    Row(
                        cell=key,
                        context=index,
                        commit="abc",
                        answers=answers,
                        usage=USAGE,
                        step_us=[1000.0],
                        prompt_tokens=100,
                    )
                )
    return build_report(grid, "x", store, describe(now()), title="t", model="m")


@pytest.fixture
def scripts():
    """The two scripts as modules."""
    from benchmarks.quality import ablations, quality

    return quality, ablations


def test_bars_are_met_or_not(scripts):
    quality, _ = scripts
    grid, _ = quality.grids(40, 4096)
    right = {"full": list(range(10)), "streaming_llm": [0], "snapkv": [0, 1, 2, 3, 4, 5, 6], "sekv": list(range(9))}
    lines = quality.verdicts(report_of(grid, right)).splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:]]
    assert [(line[0], line[2], line[-1]) for line in cells] == [
        ("5 %", "65", "yes"),
        ("10 %", "85", "yes"),
        ("20 %", "95", "no"),
    ]
    assert cells[0][1].startswith("90 (")
    assert cells[0][3].startswith("+80.0 (")
    assert cells[0][4].startswith("+20.0 (")


def test_parts_reuse_the_rows_of_the_methods(scripts):
    quality, _ = scripts
    methods, parts = quality.grids(None, 4096)
    assert (methods.samples, parts.samples) == (200, 50)

    def keys(grid, label):
        return {cell_of(grid, "x", v, "dense", 4096, "unseen").key for v in grid.variants if v.label == label}

    assert keys(methods, "sekv") == keys(parts, "sekv")
    assert keys(methods, "full") == keys(parts, "full")
    assert len(methods.variants) == 1 + 3 * 3
    assert len(parts.variants) == 1 + 4 * 3


def test_switches_say_which_way_they_move_and_what_the_paper_says(scripts):
    _, ablations = scripts
    grid = ablations.grid(40, 4096, with_grids=True)
    right = {variant.label: [0, 1, 2, 3, 4, 5, 6, 7] for variant in grid.variants}
    right |= {"full": list(range(10)), "no anchors": [0], "global threshold": list(range(10))}
    lines = ablations.switch_table(report_of(grid, right)).splitlines()[2:]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.strip("| ").split("|")] for line in lines}
    assert list(cells) == [switch.label for switch in ablations.SWITCHES]
    assert cells["no anchors"][1:2] + cells["no anchors"][4:] == ["paper", "lower", "-3.9 / -3.1", "yes"]
    assert cells["no anchors"][3].startswith("-70.0 (")
    assert cells["global threshold"][1] == "paper"
    assert (cells["global threshold"][4], cells["global threshold"][6]) == ("higher", "no")
    assert (cells["fixed chunks"][4], cells["fixed chunks"][6]) == ("open", "not seen")


def test_every_option_exists(scripts):
    from semkv.methods import find_method

    quality, ablations = scripts
    variants: list[Variant] = [*ablations.grid(1, 64, with_grids=True).variants, *quality.grids(1, 64)[1].variants]
    for variant in variants:
        assert find_method(variant.method, variant.options).name == variant.method


def test_results_are_written_in_six_digits_and_read_again(tmp_path, monkeypatch):
    """What tables show is there afterwards, a cell is a line, and of what no table reads only the changes that are asked for stay."""
    budgets = (0.1, 0.2)
    variants = (Variant(method="full"), *(Variant(method=m, budget=b) for m in ("sekv", "quest") for b in budgets))
    grid = Grid(variants=variants, families=("single",), lengths=(64,), samples=30)
    report = report_of(grid, {"full": [*range(10)], "sekv": [0, 1, 2], "quest": [1, 5]})
    monkeypatch.setattr(grids, "RESULTS", tmp_path)
    grids.write_results("some", grids.lean(report, {"sekv"}))
    found = Report.model_validate_json((tmp_path / "some.json").read_text())
    assert markdown(found) == markdown(report)
    assert {s.variant.label for s in found.summaries if s.ahead} == {"sekv"}
    assert all(not cell.depths for cell in found.cells)
    assert sum(line.startswith(' {"cell"') for line in (tmp_path / "some.json").read_text().splitlines()) == len(
        found.cells
    )
    assert json.loads(grids.as_text({"a": [{"b": 1 / 3, "c": [2, None]}], "d": (1e-9 / 7, True), "e": {}})) == {
        "a": [{"b": 0.333333, "c": [2, None]}],
        "d": [1.42857e-10, True],
        "e": {},
    }
