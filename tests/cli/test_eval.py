"""`semkv eval` from the command line to files, on a tiny random model."""

import json
import re

import pytest

import semkv
from semkv.evaluation import Report

ARGUMENTS = (
    "--methods",
    "full,streaming_llm,snapkv",
    "--budgets",
    "0.5,48",
    "--lengths",
    "96,128",
    "--samples",
    "3",
    "--questions-per-context",
    "2",
    "--families",
    "single,dense",
)


@pytest.fixture(scope="module")
def evaluated(tiny_model, tmp_path_factory):
    """The folder and output of one finished run."""
    from typer.testing import CliRunner

    from semkv.cli.main import app

    folder = tmp_path_factory.mktemp("eval")
    outputs = ["--json", str(folder / "out.json"), "--plot", str(folder / "pictures")]
    result = CliRunner().invoke(app, ["eval", "--model", str(tiny_model), *ARGUMENTS, *outputs])
    assert result.exit_code == 0, result.output
    return folder, result


def test_the_report_has_every_cell_and_where_it_comes_from(evaluated):
    folder, _ = evaluated
    report = Report.model_validate_json((folder / "out.json").read_text())
    assert report.complete
    assert len(report.cells) == 5 * 2 * 2
    assert {c.accuracy.samples for c in report.cells} == {3}
    assert {c.accuracy.contexts for c in report.cells} == {2}
    for cell in report.cells:
        assert cell.usage.device > 0
        assert cell.usage.full > 0
        assert cell.step_us.median > 0
        if cell.cell.variant.budget == 0.5:
            assert 0.0 < cell.device_share <= 0.5
        if cell.cell.variant.budget is not None:
            assert 0.0 < cell.usage.budget_used <= 1.0
        else:
            assert cell.device_share == pytest.approx(1.0, abs=0.2)
    assert report.environment.versions["torch"]
    assert report.environment.machine
    assert report.environment.commit


def test_tables_and_file_names_are_printed(evaluated):
    folder, result = evaluated
    for part in ("Exact answers (%), 96 tokens", "Memory and time, 128 tokens", "streaming_llm", "50 %", "48 tokens"):
        assert part in result.stdout
    assert f"results: {folder / 'out.json'}" in result.stdout
    pictures = sorted(path.name for path in (folder / "pictures").iterdir())
    assert pictures == [
        "accuracy_unseen_128.png",
        "accuracy_unseen_96.png",
        "needles_unseen_budget_0.5.png",
        "needles_unseen_budget_48.png",
    ]


def test_a_method_that_a_budget_is_too_small_for_is_left_out_and_named(run, tiny_model):
    """The others are measured all the same; where none is left it is an error."""
    asked = ("--budgets", "0.4", "--lengths", "128", "--families", "single", "--samples", "1")
    result = run("eval", "--model", tiny_model, "--methods", "full,streaming_llm,quest", *asked)
    assert result.exit_code == 0, result.output
    assert "streaming_llm" in result.stdout
    assert not re.search(r"^ *quest ", result.stdout, re.MULTILINE)
    assert re.search(
        r"left out: quest at 40 %: .*budget 0\.4 is too small for 'quest'", " ".join(result.stderr.split())
    )
    result = run("eval", "--model", tiny_model, "--methods", "full,quest", *asked)
    assert result.exit_code == 2
    assert "budget 0.4 is too small for 'quest'" in " ".join(result.stderr.split())


def test_the_same_command_reads_its_rows_back(evaluated, run, tiny_model):
    folder, _ = evaluated
    rows = folder / "out.rows.jsonl"
    before, report = rows.read_text(), json.loads((folder / "out.json").read_text())
    result = run("eval", "--model", tiny_model, *ARGUMENTS, "--json", folder / "out.json")
    assert result.exit_code == 0, result.output
    assert rows.read_text() == before
    assert json.loads((folder / "out.json").read_text())["cells"] == report["cells"]


def test_an_interrupt_says_how_to_go_on(evaluated, run, tiny_model, tmp_path, monkeypatch):
    from semkv.evaluation.store import RowStore

    add = RowStore.add

    def add_two(self, row):
        add(self, row)
        if len(self._rows) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowStore, "add", add_two)
    out = tmp_path / "out.json"
    result = run("eval", "--model", tiny_model, *ARGUMENTS, "--json", out)
    assert result.exit_code == 130
    assert "stopped before it was complete; run the same command to go on" in result.stderr
    assert len((tmp_path / "out.rows.jsonl").read_text().splitlines()) == 2
    assert json.loads(out.read_text())["complete"] is False


def test_generated_tokens_in_both_modes(run, tiny_model, tmp_path):
    out = tmp_path / "out.json"
    arguments = (
        "eval",
        "--model",
        tiny_model,
        "--budgets",
        "0.4",
        "--lengths",
        "96",
        "--samples",
        "2",
        "--families",
        "dense",
    )
    result = run(*arguments, "--methods", "snapkv,h2o", "--generated", "budgeted,kept", "--json", out)
    assert result.exit_code == 0, result.output
    report = Report.model_validate_json(out.read_text())
    usage = {cell.cell.variant.label: cell.usage for cell in report.cells}
    assert list(usage) == ["snapkv", "snapkv, kept", "h2o"]
    assert usage["snapkv"].excess_share == usage["h2o"].excess_share == 0
    kept = usage["snapkv, kept"]
    assert 0 < kept.excess_share_mean <= kept.excess_share < 1
    assert kept.budget_used > 1
    assert kept.device_share >= kept.excess_share + 0.35
    assert "beyond" in result.output
    refused = run(*arguments, "--methods", "h2o", "--generated", "kept")
    assert refused.exit_code != 0
    assert "'h2o' has no option 'generated'" in refused.output
    assert "--generated 'all': expected budgeted, kept" in run(*arguments, "--generated", "all").output


def test_seen_questions(run, tiny_model, tmp_path):
    result = run(
        "eval",
        "--model",
        tiny_model,
        "--methods",
        "full,snapkv",
        "--budgets",
        "0.5",
        "--lengths",
        "96",
        "--samples",
        "1",
        "--families",
        "dense",
        "--question",
        "both",
        "--kv-dtype",
        "float16",
    )
    assert result.exit_code == 0, result.output
    assert "question unseen" in result.stdout
    assert "question seen" in result.stdout


def test_a_method_without_its_profile_says_how_to_make_one(run, tiny_model):
    result = run("eval", "--model", tiny_model, "--methods", "sketch", "--budgets", "0.5", "--lengths", "256")
    assert result.exit_code == 2
    assert "semkv-profile" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_budget_below_the_methods_smallest_is_one_line(run, tiny_model):
    result = run(
        "eval", "--model", tiny_model, "--methods", "snapkv", "--budgets", "2", "--lengths", "96", "--samples", "1"
    )
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "snapkv" in result.stderr


def test_explain_prints_a_row_per_site(run, tiny_model):
    result = run("explain", tiny_model, "--method", "streaming_llm", "--budget", "0.25")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("streaming_llm") >= 2
    assert "GQA x2" in result.stdout


@pytest.fixture(scope="module")
def tiny_profile(tiny_model, tmp_path_factory):
    """Folder of a profile of the tiny model, calibrated for one step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from semkv.profiles.calibration import CalibrationSettings, bundled_data, calibrate

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    settings = CalibrationSettings.checked(length=128, queries=8, max_steps=1, sequences=1, held_out=1, budgets=(0.5,))
    data = bundled_data(AutoTokenizer.from_pretrained(tiny_model), settings)
    made = calibrate(model, data, settings, name="tiny")
    return made.profile.save(tmp_path_factory.mktemp("profile") / "tiny.profile")


def test_sekv_with_its_profile_draws_its_zoom_rates(run, tiny_model, tiny_profile, tmp_path):
    out = tmp_path / "out.json"
    result = run(
        "eval",
        "--model",
        tiny_model,
        "--profile",
        tiny_profile,
        "--methods",
        "full,sekv",
        "--budgets",
        "0.5",
        "--lengths",
        "256",
        "--samples",
        "2",
        "--families",
        "dense",
        "--json",
        out,
        "--plot",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "zoom_sekv_unseen_256.png").stat().st_size > 5000
    cell = next(c for c in Report.model_validate_json(out.read_text()).cells if c.cell.variant.method == "sekv")
    assert 0.0 < cell.usage.budget_used <= 1.0
    assert cell.usage.host > 0
    assert cell.zoom is not None
    assert [len(rates) for rates in cell.zoom.rates] == [4, 4]
    assert cell.cell.parameters["router"] == "coarse"


def test_a_profile_of_another_model_is_refused(run, tiny_profile):
    result = run("eval", "--profile", tiny_profile, "--methods", "sekv", "--lengths", "256", "--samples", "1")
    assert result.exit_code == 2
    assert "this profile belongs to another model" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_auto_is_named_under_the_tables(run, tmp_path):
    asked = ("--budgets", "0.2", "--lengths", "512", "--samples", "1", "--families", "single")
    result = run("eval", "--methods", "full,auto", *asked, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    report = Report.model_validate_json((tmp_path / "out.json").read_text())
    best = semkv.bundled.profile().best_method(0.2)
    assert [(c.cell.variant.label, c.cell.variant.method) for c in report.cells] == [("full", "full"), ("auto", best)]
    assert f"auto, as the profile measured: {best} at 20 %" in result.stdout


def test_latents_are_for_models_that_have_them(run, tiny_model):
    result = run("eval", "--model", tiny_model, *ARGUMENTS, "--latents")
    assert result.exit_code == 2
    assert "latent" in result.stderr
