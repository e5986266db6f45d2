"""Runs: what is shared, what resumes, what is refused, and that the numbers are those of the answers."""

import json
from dataclasses import replace

import pytest

from semkv import bundled
from semkv.errors import BudgetError, ConfigError
from semkv.evaluation import Grid, Report, Variant, evaluate
from semkv.evaluation.runner import Work, _side_by_side, cell_of, missing_work, run_grid
from semkv.evaluation.settings import build_variants, settle_auto
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import Subject
from semkv.profiles.schema.sections import Choice


def accuracies(report, length=256):
    return {
        (c.cell.variant.method, c.cell.variant.budget, c.cell.family): c.accuracy.value
        for c in report.cells
        if c.cell.length == length
    }


def test_accuracy_follows_what_a_method_kept(lookup, tokenizer, grid):
    report = evaluate(lookup, tokenizer, grid.model_copy(update={"samples": 60}), identity="x", model="lookup")
    found = accuracies(report)
    assert found["full", None, "dense"] == 1.0
    assert found["full", None, "single"] == 1.0
    for method in ("tail", "head"):
        assert 0.05 < found[method, 0.25, "dense"] < 0.45
        assert found[method, 0.25, "dense"] < found[method, 0.5, "dense"] < 0.7
    assert report.complete
    half = [c for c in report.cells if c.cell.variant.budget == 0.5 and c.cell.variant.method == "tail"]
    for cell in half:
        shallow = [b for b in cell.depths if b.stop <= 0.4]
        deep = [b for b in cell.depths if b.start >= 0.6]
        assert all(b.accuracy.value == 0.0 for b in shallow)
        assert all(b.accuracy.value == 1.0 for b in deep)


def test_one_prefill_serves_all_methods_budgets_and_questions(lookup, tokenizer, grid):
    evaluate(lookup, tokenizer, grid, identity="x")
    contexts = 2 * 2 * 3  # families, lengths, contexts of 4 + 4 + 2 questions
    assert lookup.log == {"prefill": contexts, "compress": 5 * contexts}


def test_seen_questions_are_part_of_their_own_prefill(lookup, tokenizer, grid):
    seen = grid.model_copy(update={"questions": ("seen",), "lengths": (128,), "families": ("dense",)})
    report = evaluate(lookup, tokenizer, seen, identity="x")
    assert lookup.log == {"prefill": 10, "compress": 50}
    assert next(c for c in report.cells if c.cell.variant.method == "full").accuracy.value == 1.0


@pytest.mark.parametrize("question", ["unseen", "seen"])
def test_a_variant_that_a_later_context_refuses(lookup, tokenizer, grid, question):
    """It ends the run, with what there was before; or it is noted and asked no more, and is not in the report."""
    variants = (Variant(method="picky", budget=0.5), Variant(method="tail", budget=0.5))
    asked = {"variants": variants, "families": ("single",), "lengths": (256,), "questions": (question,), "samples": 12}
    picky, place = grid.model_copy(update=asked), "single, 256 tokens, context"
    with pytest.raises(BudgetError, match=f"{place} .: budget 0.5 is too small for 'picky'"):
        evaluate(lookup, tokenizer, picky, identity="x")
    refusals = []
    report = evaluate(lookup, tokenizer, picky, identity="x", refusals=refusals)
    assert [(refusal.variant.method, refusal.why[: len(place)]) for refusal in refusals] == [("picky", place)]
    assert [(c.cell.variant.method, c.accuracy.samples) for c in report.cells] == [("tail", 12)]
    assert report.complete


@pytest.mark.parametrize(("question", "method"), [("unseen", "tail"), ("unseen", "picky"), ("seen", "tail")])
def test_contexts_that_run_together_give_the_rows_of_each_alone(lookup, tokenizer, grid, question, method):
    grid = grid.model_copy(
        update={
            "questions": (question,),
            "families": grid.families if method == "tail" else grid.families[:1],
            "variants": (*grid.variants, Variant(method=method, budget=0.3)),
            "samples": 20,
        }
    )
    rows, refused = [], []
    for together in (1, 3):
        lookup.log.pop("first", None)
        store, refusals = RowStore(None), []
        run_grid(Subject(lookup, "test"), tokenizer, grid, store, refusals=refusals, together=together)
        rows.append({key: (row.answers, row.usage, len(row.step_us)) for key, row in store._rows.items()})
        refused.append(refusals)
    assert rows[0] == rows[1]
    assert refused[0] == refused[1]
    assert len(refused[0]) == (method == "picky")
    assert max(lookup.log["rows"]) == 3
    with pytest.raises(ConfigError, match="together 0: expected at least 1 context"):
        run_grid(Subject(lookup, "test"), tokenizer, grid, RowStore(None), together=0)


@pytest.mark.parametrize(
    ("together", "processes", "sizes"),
    [(1, 2, [1] * 8), (3, 1, [3, 3, 2]), (16, 1, [8]), (16, 2, [4, 4]), (16, 3, [3, 3, 2]), (3, 16, [1] * 8)],
)
def test_groups_of_contexts_are_as_many_as_processes(together, processes, sizes):
    """Few contexts are shared by all processes before any of them has many; other lengths and modes stand in groups of their own."""
    work = [Work("single", 128, "unseen", place, 1, ()) for place in range(8)]
    other = [Work("single", length, question, 0, 1, ()) for length, question in ((256, "unseen"), (128, "seen"))]
    groups = _side_by_side([*work[:5], *other, *work[5:]], together, processes)
    assert [len(group) for group in groups if group[0] in work] == sizes
    assert [item for group in groups for item in group if item in work] == work
    assert [group for group in groups if group[0] in other] == [(other[0],), (other[1],)]


def test_bytes_ratio_and_steps_are_measured(lookup, tokenizer, grid):
    report = evaluate(lookup, tokenizer, grid, identity="x")
    for cell in report.cells:
        variant = cell.cell.variant
        share = 1.0 if variant.budget is None else variant.budget
        assert cell.device_share == pytest.approx(share, abs=0.12)
        assert cell.usage.steps == cell.step_us.steps + 10  # and one call per question
        assert cell.usage.budget_used == 0.5
        assert cell.moved_per_step == 10.0
        assert cell.accuracy.samples == 10
        assert cell.accuracy.contexts == 3
        assert (cell.zoom is not None) == (variant.method == "head")
        if cell.zoom:
            assert (cell.zoom.sites, cell.zoom.rates) == ([1], [[0.25, 0.0]])
    full = next(s for s in report.summaries if s.variant.method == "full")
    assert (full.ratio.value, full.ratio.samples, full.ratio.contexts) == (1.0, 20, 6)


def test_leads_are_paired_on_the_same_questions(lookup, tokenizer, grid):
    report = evaluate(lookup, tokenizer, grid.model_copy(update={"samples": 40}), identity="x")
    mean = {(s.variant.method, s.variant.budget, s.length): s for s in report.summaries}
    for (method, budget, length), summary in mean.items():
        others = {"tail": ["head"], "head": ["tail"], "full": []}[method]
        assert list(summary.ahead) == others
        for other in others:
            lead = summary.ahead[other]
            assert lead.value == pytest.approx(summary.accuracy.value - mean[other, budget, length].accuracy.value)
            assert lead.low <= lead.value <= lead.high
            assert mean[other, budget, length].ahead[method].value == pytest.approx(-lead.value)


def test_ratio_is_absent_where_the_full_cache_answers_nothing(lookup, tokenizer, grid):
    # The lookup model knows no chains and no spans.
    multi = grid.model_copy(update={"families": ("multi",), "lengths": (128,), "samples": 4})
    report = evaluate(lookup, tokenizer, multi, identity="x")
    assert all(c.ratio is None for c in report.cells)


def test_a_finished_run_is_read_back_without_work(lookup, tokenizer, grid, tmp_path):
    rows = tmp_path / "rows.jsonl"
    first = evaluate(lookup, tokenizer, grid, identity="x", rows=rows)
    done = dict(lookup.log)
    second = evaluate(lookup, tokenizer, grid, identity="x", rows=rows)
    assert lookup.log == done
    assert second.cells == first.cells
    assert Report.model_validate_json(first.model_dump_json()) == first


def test_an_interrupt_keeps_every_row_and_the_next_run_does_the_rest(lookup, tokenizer, grid, tmp_path):
    rows = tmp_path / "rows.jsonl"

    def stop(done, total, place):
        if done == 17:
            raise KeyboardInterrupt

    part = evaluate(lookup, tokenizer, grid, identity="x", rows=rows, progress=stop)
    assert not part.complete
    assert part.notes == ["stopped before it was complete"]
    assert len(rows.read_text().splitlines()) == 17
    seen = []
    whole = evaluate(lookup, tokenizer, grid, identity="x", rows=rows, progress=lambda *a: seen.append(a))
    total = 5 * 2 * 2 * 3
    assert whole.complete
    assert seen[-1][:2] == (total - 17, total - 17)
    fresh = evaluate(type(lookup)(tokenizer), tokenizer, grid, identity="x")
    assert accuracies(whole) == accuracies(fresh)


def test_more_samples_add_to_what_is_there(lookup, tokenizer, grid, tmp_path):
    rows = tmp_path / "rows.jsonl"
    evaluate(lookup, tokenizer, grid, identity="x", rows=rows)
    before = lookup.log["prefill"]
    more = grid.model_copy(update={"samples": 16})
    evaluate(lookup, tokenizer, more, identity="x", rows=rows)
    # Per family and length: contexts 0 and 1 stand, 2 had two of its four questions, 3 is new.
    assert lookup.log["prefill"] - before == 2 * 2 * 2


def test_fewer_samples_take_the_first_of_what_is_there(lookup, tokenizer, grid, tmp_path):
    rows = tmp_path / "rows.jsonl"
    evaluate(lookup, tokenizer, grid, identity="x", rows=rows)
    report = evaluate(lookup, tokenizer, grid.model_copy(update={"samples": 7}), identity="x", rows=rows)
    assert {c.accuracy.samples for c in report.cells} == {7}


def test_rows_of_another_model_are_not_reused(lookup, tokenizer, grid, tmp_path):
    rows = tmp_path / "rows.jsonl"
    evaluate(lookup, tokenizer, grid, identity="x", rows=rows)
    assert len(missing_work(grid, "y", RowStore(rows))) == 2 * 2 * 3


def test_options_are_part_of_a_cell_and_labels_are_not(grid):
    store = RowStore(None)

    def key(**changes):
        variant = Variant(method="sekv", budget=0.1, **changes)
        return missing_work(grid.model_copy(update={"variants": (variant,)}), "x", store)[0].variants[0][1]

    assert key() == key(label="SeKV")
    assert key() != key(options={"router": "oracle"})


def test_a_methods_defaults_are_part_of_a_cell(grid):
    def cell(**options):
        variant = Variant(method="snapkv", budget=0.1, options=options)
        return cell_of(grid, "x", variant, "dense", 128, "unseen")

    assert cell().parameters == {"generated": "budgeted", "window": 32, "kernel": 7, "pool": "max"}
    assert cell(kernel=5).parameters["kernel"] == 5
    assert cell().key != cell().model_copy(update={"parameters": {"window": 16}}).key


def test_a_line_cut_short_is_dropped_and_measured_again(lookup, tokenizer, grid, tmp_path):
    rows = tmp_path / "rows.jsonl"
    evaluate(lookup, tokenizer, grid, identity="x", rows=rows)
    rows.write_text(rows.read_text()[:-40])
    store = RowStore(rows)
    assert sum(len(w.variants) for w in missing_work(grid, "x", store)) == 1
    assert rows.read_text().endswith("\n")


def test_damage_inside_the_file_is_an_error(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"cell": 3}\n{}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 1: not a row of an evaluation .* delete this one"):
        RowStore(rows)


def test_rows_are_json_lines(lookup, tokenizer, grid, tmp_path):
    rows = tmp_path / "deep" / "rows.jsonl"
    evaluate(lookup, tokenizer, grid, identity="x", rows=rows)
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        assert set(row) >= {"cell", "context", "commit", "answers", "usage", "step_us"}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"families": ("triple",)}, ConfigError, "family 'triple': expected one of single, multi, confusable, dense"),
        ({"lengths": (2048,)}, ConfigError, "length 2048: the model's context is 2048 tokens .* at most 1984"),
        (
            {"variants": (Variant(method="tail", budget=0.05),)},
            BudgetError,
            r"budget 0.05 at length 128 leaves 6.4 tokens per KV head, method 'tail' needs at least 8: take a larger",
        ),
        ({"lengths": (0,)}, ConfigError, "length 0: expected a positive whole number of tokens"),
        ({"variants": (Variant(method="nope"),)}, ConfigError, "method 'nope': expected one of"),
        ({"variants": (Variant(method="tail"),)}, BudgetError, "method 'tail' compresses and needs a budget"),
        (
            {"lengths": (32,), "families": ("confusable",)},
            ConfigError,
            "length 32 for family 'confusable': 32 tokens are",
        ),
    ],
)
def test_a_grid_that_cannot_run_is_refused_before_work(lookup, tokenizer, grid, changes, error, message):
    with pytest.raises(error, match=message):
        evaluate(lookup, tokenizer, grid.model_copy(update=changes), identity="x")
    assert lookup.log == {"prefill": 0, "compress": 0}


@pytest.mark.parametrize("budget", [0.0, 2.0, float("nan"), -0.1, 0, True])
def test_budgets_out_of_range_are_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        Variant(method="sekv", budget=budget)


def test_full_runs_once_and_takes_no_budget():
    variants = build_variants(["full", "sekv", "full"], [0.1, 0.2, 0.1])
    assert [(v.method, v.budget) for v in variants] == [("full", None), ("sekv", 0.1), ("sekv", 0.2)]


def test_both_modes_of_generated_tokens_where_a_method_has_them():
    variants = build_variants(["full", "h2o", "snapkv"], [0.1, 64], ("budgeted", "kept"))
    told = [(v.label, v.budget, v.options) for v in variants]
    kept = {"generated": "kept"}
    assert told[:3] == [("full", None, {}), ("h2o", 0.1, {}), ("h2o", 64, {})]
    assert told[3:] == [
        ("snapkv", 0.1, {}),
        ("snapkv", 64, {}),
        ("snapkv, kept", 0.1, kept),
        ("snapkv, kept", 64, kept),
    ]
    for method, said in (("h2o", "method 'h2o' has no option 'generated'"), ("auto", "name the methods instead")):
        with pytest.raises(ConfigError, match=said):
            build_variants([method], [0.1], ("kept",))


def test_whole_number_budgets_stay_whole_through_json():
    variant = Variant(method="sekv", budget=128)
    again = Variant.model_validate_json(variant.model_dump_json())
    assert isinstance(again.budget, int)
    assert (variant.budget_text, Variant(method="sekv", budget=0.1).budget_text) == ("128 tokens", "10 %")
    one = Variant.model_validate_json(Variant(method="sekv", budget=1.0).model_dump_json())
    assert isinstance(one.budget, float)


def test_grids_have_at_least_one_sample():
    with pytest.raises(ValueError, match="samples"):
        Grid(variants=(Variant(method="full"),), families=("single",), lengths=(128,), samples=0)


def test_variants_that_differ_by_label_alone_are_measured_once(lookup, tokenizer, grid):
    twins = (Variant(method="tail", budget=0.5), Variant(method="tail", budget=0.5, label="twin"))
    asked = grid.model_copy(update={"variants": twins, "families": ("single",), "lengths": (256,)})
    report = evaluate(lookup, tokenizer, asked, identity="x")
    assert lookup.log == {"prefill": 3, "compress": 3}
    first, second = report.cells
    assert (first.cell.variant.label, second.cell.variant.label) == ("tail", "twin")
    assert first.accuracy == second.accuracy
    assert report.complete


def test_auto_is_what_the_profile_measured_at_the_budget():
    table = [
        Choice(method=m, budget=b, length=256, score=s, samples=4)
        for m, b, s in (
            ("sekv", 0.1, 0.9),
            ("quest", 0.1, 0.8),
            ("sekv", 0.2, 0.8),
            ("quest", 0.2, 1.0),
        )
    ]
    profile = bundled.profile()
    profile = replace(profile, info=profile.info.model_copy(update={"choices": tuple(table)}))
    found = settle_auto(build_variants(["full", "auto", "sekv"], [0.1, 0.2, 64]), profile)
    assert [(v.label, v.method, v.budget) for v in found] == [
        ("full", "full", None),
        ("auto", "sekv", 0.1),
        ("auto", "quest", 0.2),
        ("auto", "quest", 64),
        ("sekv", "sekv", 0.1),
        ("sekv", "sekv", 0.2),
        ("sekv", "sekv", 64),
    ]
    empty = replace(profile, info=profile.info.model_copy(update={"choices": ()}))
    for lacking, message in ((None, "needs a profile"), (empty, "this profile holds none")):
        with pytest.raises(ConfigError, match=message):
            settle_auto(build_variants(["auto"], [0.1]), lacking)
