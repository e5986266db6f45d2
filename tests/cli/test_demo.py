"""`semkv demo`, cut short: a calibration, an answer in sight, a table and pictures."""

import pytest

from semkv.evaluation import Report
from semkv.profiles.schema import Profile

SHORT = ("--contexts", "3", "--samples", "4", "--length", "512")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_runs_the_whole_road_and_takes_its_profile_up_again(run, tmp_path):
    result = run("demo", *SHORT, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    for part in (
        "1. The bundled model",
        "2. Calibrate: codebooks of the keys, from 3 contexts of 512 tokens",
        "3. Compile: sketch, 10 % of the full KV",
        "4. Ask:",
        "right answer: ",
        "Exact answers (%), 512 tokens, question unseen",
        "Memory and time, 512 tokens",
    ):
        assert part in result.stdout
    for name in ("accuracy_unseen_512.png", "needles_unseen_budget_0.1.png", "zoom_sketch_unseen_512.png"):
        assert (tmp_path / name).stat().st_size > 5000
    report = Report.model_validate_json((tmp_path / "results.json").read_text())
    assert report.complete
    assert {cell.cell.variant.method for cell in report.cells} == {"full", "streaming_llm", "snapkv", "sekv", "sketch"}
    assert all(cell.usage.budget_used <= 1.0 for cell in report.cells)
    assert all(cell.accuracy.value >= 0.5 for cell in report.cells if cell.cell.variant.method == "full")
    assert Profile.load(tmp_path / "profile").info.sketch is not None
    again = run("demo", *SHORT, "--out", tmp_path)
    assert again.exit_code == 0, again.output
    assert "from a former run" in again.stdout
    assert Report.model_validate_json((tmp_path / "results.json").read_text()).cells == report.cells
