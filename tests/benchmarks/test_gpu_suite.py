"""What the GPU suite's parts say of their results, without a GPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A benchmark by name, as a script beside it imports it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def table(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("gpu_table")


def test_our_reading_stands_beside_the_best_other(table, tmp_path):
    one = {"entries": 4096, "rows": 1, "nbytes": 16 << 20, "share": 0.5}
    lines = [
        one | {"reader": "semkv", "us": 10.0},
        one | {"reader": "SDPA", "us": 8.0},
        one | {"reader": "FlashInfer", "us": 9.0},
    ]
    lines.append(one | {"reader": "semkv", "us": 90.0, "nbytes": 512 << 20, "share": 0.9})
    path = tmp_path / "mixed_attention.json"
    path.write_text(json.dumps({"lines": lines}))
    assert table.kernel_lines(path) == [
        "attention   4096 entries,   1 rows: 50% of copy, 1.25 of the best other's time (bar 1.25)",
        "attention   4096 entries,   1 rows: 90% of copy, no other (bar 80 %)",
    ]


def test_a_step_that_left_no_report_leaves_no_lines(table, tmp_path):
    assert table.kernel_lines(tmp_path / "none.json") == table.step_lines(tmp_path / "none.json") == []


def test_a_cell_says_its_time_over_the_floor_or_why_there_is_none(table, tmp_path):
    cell = {"name": "sekv", "tokens": 131072, "rows": 1, "budget": 0.1, "steps": 24}
    told = {"missing": None, "first_ms": None, "median_ms": 9.0, "p99_ms": 11.0, "stall_ms": 0.2, "floor_ms": 6.0}
    path = tmp_path / "decode_step.json"
    results = [{"cell": cell} | told, {"cell": cell} | told | {"missing": "the deadline had passed"}]
    path.write_text(json.dumps({"results": results}))
    first, second = table.step_lines(path)
    assert first.endswith("131072 tokens,  1 rows, budget 0.1: 9.00 ms, p99 11.00, stalled 0.20, 1.50 of the floor")
    assert second.endswith("missing, the deadline had passed")


def test_cells_cover_the_claims_once_and_the_most_telling_come_first(load):
    step = load("decode_step")
    found = step.cells([32768, 131072, 262144, 524288], 0.1, 4096, 24, 1000, 8)
    assert len(set(found)) == len(found)
    assert {(one.name, one.tokens) for one in found[:4]} == {
        ("DynamicCache", 131072), ("full", 131072), ("sekv, 95 % overlap", 131072), ("compresskv, 95 % overlap", 131072)
    }  # fmt: skip
    assert {one.tokens for one in found if one.name == "sekv" and one.budget == 4096} == {32768, 131072, 262144, 524288}
    assert any(one.name == "DynamicCache" and one.tokens == 262144 for one in found)
    assert set(step.THEIRS) <= {one.name for one in found}
    assert {one.tokens for one in found if one.name.startswith("first token")} == {131072}
    assert any(one.rows == 8 for one in found)
    assert any(one.steps == 1000 for one in found)
