"""The committed figures of the kernels' machine code: complete, without spills, and those of the page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    from benchmarks.speed import kernel_report

    return kernel_report


def test_every_kernel_is_there_for_every_model_and_target(report):
    rows = json.loads(report.RESULTS.read_text())["rows"]
    found = {(row["kernel"], row["model"], row["capability"]) for row in rows}
    wanted = {
        (name, model, capability)
        for model, sizes in report.MODELS.items()
        for operation in report.OPERATIONS
        for name, _ in operation(sizes)
        for capability in report.CAPABILITIES
    }
    assert found == wanted


def test_nothing_spills_and_everything_fits(report):
    """Two programs at least on a multiprocessor: exact entries are read fastest so, of the layouts that were timed on an H200."""
    for row in json.loads(report.RESULTS.read_text())["rows"]:
        assert row["stack_bytes"] == 0, row
        assert row["registers"] < 255, row
        assert row["occupancy"] >= 0.125, row


def test_the_page_has_these_figures(report):
    page = report.PAGE.read_text(encoding="utf-8")
    assert report.filled(page, json.loads(report.RESULTS.read_text())["rows"]) == page


@pytest.mark.slow
def test_machine_code_made_now_does_not_spill(report):
    """With the compiler that is installed, which may not be the one of the committed figures."""
    for row in report.measure():
        assert row["stack_bytes"] == 0, row
        assert row["occupancy"] > 0, row
