"""Pictures of the right size with something on them; tables with the report's numbers."""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from semkv.evaluation.plots import (
    DPI,
    STYLES,
    _zoom_map,
    accuracy_by_budget,
    draw_all,
    needle_heatmap,
    styles,
    zoom_heatmap,
)
from semkv.evaluation.schema import Interval, Zoom
from semkv.evaluation.tables import markdown, millis, percent, provenance, rich_tables, size
from semkv.methods import METHODS


def check_picture(path, least_width, least_height):
    image = imread(path)
    height, width = image.shape[:2]
    assert width >= least_width * DPI
    assert height >= least_height * DPI
    assert width * height < 4000 * 3000
    assert len({tuple(pixel) for pixel in image[::7, ::7].reshape(-1, image.shape[2]).tolist()}) > 8
    border = image[:, -3:, :3]
    assert border.min() > 0.97  # nothing runs off the right edge


def test_accuracy_against_budget(report, tmp_path):
    path = accuracy_by_budget(report, "unseen", 256, tmp_path / "new" / "a.png")
    check_picture(path, 8.0, 3.5)


def test_needle_heat_map(report, tmp_path):
    check_picture(needle_heatmap(report, "unseen", 0.25, tmp_path / "n.png"), 6.0, 4.0)
    of_one = report.model_copy(update={"cells": [c for c in report.cells if c.cell.length == 256]})
    check_picture(needle_heatmap(of_one, "unseen", 0.25, tmp_path / "of_one_length.png"), 6.0, 5.0)


def test_needle_heat_maps_of_many_methods_take_further_rows(report, tmp_path):
    def named(c, i):
        variant = c.cell.variant.model_copy(update={"label": f"{c.cell.variant.label} {i}"})
        return c.model_copy(update={"cell": c.cell.model_copy(update={"variant": variant})})

    cells = [named(c, i) for i in range(4) for c in report.cells]
    many = report.model_copy(update={"cells": cells})
    check_picture(needle_heatmap(many, "unseen", 0.25, tmp_path / "many.png"), 6.0, 7.0)


def test_zoom_heat_map_of_the_method_that_counts_zooms(report, tmp_path):
    check_picture(zoom_heatmap(report, "unseen", 256, tmp_path / "z.png", "head"), 5.0, 2.5)
    assert zoom_heatmap(report, "unseen", 256, tmp_path / "none.png", "tail") is None
    assert not (tmp_path / "none.png").exists()


def test_a_zoom_map_has_a_row_for_every_site():
    values = _zoom_map([Zoom(sites=[1], rates=[[0.25, 0.5]], steps=4)], 4)
    assert values.shape == (4, 2)
    assert values[1].tolist() == [25.0, 50.0]
    assert np.isnan(values[[0, 2, 3]]).all()


def test_a_method_looks_the_same_in_every_picture():
    assert set(METHODS) - {"full"} <= set(STYLES)
    assert len(set(STYLES.values())) == len(STYLES)
    few, many = styles(["snapkv", "sekv"]), styles(["h2o", "sekv", "other", "snapkv", "heterocache, strict"])
    assert few["sekv"] == many["sekv"]
    assert few["snapkv"] == many["snapkv"]
    assert many["heterocache, strict"]["color"] == styles(["heterocache"])["heterocache"]["color"]
    assert many["other"]["color"] not in {many[label]["color"] for label in many if label != "other"}


def test_all_pictures_of_a_report(report, tmp_path):
    names = sorted(path.name for path in draw_all(report, tmp_path))
    assert names == [
        "accuracy_unseen_128.png",
        "accuracy_unseen_256.png",
        "needles_unseen_budget_0.25.png",
        "needles_unseen_budget_0.5.png",
        "zoom_head_unseen_128.png",
        "zoom_head_unseen_256.png",
    ]
    assert all((tmp_path / name).stat().st_size > 5000 for name in names)


def test_pictures_touch_no_global_state():
    code = (
        "import sys, semkv.evaluation.plots; "
        "assert 'matplotlib.pyplot' not in sys.modules; import matplotlib; print(matplotlib.rcParams['figure.dpi'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "100.0"


def test_tables_hold_every_variant_and_family(report):
    text = markdown(report)
    assert text.count("### Exact answers (%), ") == text.count("### Memory and time, ") == 2
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert lines[0].split(" | ")[:6] == ["| method", "budget", "single", "dense", "mean", "% of full"]
    assert [line.split(" | ")[0][2:] for line in lines[1:6]] == ["full", "tail", "tail", "head", "head"]
    assert [line.split(" | ")[1] for line in lines[1:6]] == ["-", "25 %", "50 %", "25 %", "50 %"]
    assert [line.count("|") for line in lines] == 2 * ([8] * 6 + [13] * 6)
    summary = next(s for s in report.summaries if s.variant.method == "tail")
    assert percent(summary.accuracy) in lines[2]
    console = Console(width=200, record=True, file=io.StringIO())
    for table in rich_tables(report):
        console.print(table)
    assert percent(summary.accuracy) in console.export_text()


def test_provenance_names_model_machine_versions_and_command(report):
    text = provenance(report)
    for part in ("Model: lookup.", "Machine: ", "torch ", "Commits of the rows: ", "Command: `"):
        assert part in text
    assert "not complete" not in text
    assert provenance(report.model_copy(update={"complete": False})).endswith("The run is not complete.")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes(count, text):
    assert size(count) == text


def test_percentages_show_their_interval():
    assert percent(Interval(value=0.9, low=0.8, high=0.95, samples=10, contexts=5)) == "90 (80-95)"
    assert percent(Interval(value=0.9, low=None, high=None, samples=1, contexts=1)) == "90"
    assert (percent(None), millis(None), millis(1234.0)) == ("-", "-", "1.23")
