"""What the GPU suite's parts say of their results, without a GPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def load() -> Callable[[str], ModuleType]:
    """A benchmark of speed by name."""
    return lambda name: importlib.import_module(f"benchmarks.speed.{name}")


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
    told = {"missing": None, "first_ms": None, "median_ms": 9.0, "p99_ms": 11.0, "floor_ms": 6.0}
    path = tmp_path / "decode_step.json"
    results = [{"cell": cell} | told, {"cell": cell} | told | {"missing": "the deadline had passed"}]
    path.write_text(json.dumps({"results": results}))
    first, second = table.step_lines(path)
    assert first.endswith("131072 tokens,  1 rows, budget 0.1: 9.00 ms, p99 11.00, 1.50 of the floor")
    assert second.endswith("missing, the deadline had passed")


def test_cells_cover_the_claims_once_and_the_most_telling_come_first(load):
    step = load("decode_step")
    found = step.cells([32768, 131072, 262144, 524288], 0.1, 4096, 24, 1000, 8)
    assert len(set(found)) == len(found)
    first = {"DynamicCache", "StaticCache", "full", "sekv, 95 % overlap", "compresskv, 95 % overlap"}
    assert {(one.name, one.tokens) for one in found[:5]} == {(name, 131072) for name in first}
    assert {one.tokens for one in found if one.name == "sekv" and one.budget == 4096} == {32768, 131072, 262144, 524288}
    assert any(one.name == "DynamicCache" and one.tokens == 262144 for one in found)
    assert set(step.THEIRS) <= {one.name for one in found}
    assert {one.tokens for one in found if one.name.startswith("first token")} == {131072}
    assert any(one.rows == 8 for one in found)
    assert any(one.steps == 1000 for one in found)


def test_the_page_says_where_the_bars_are_met(load):
    page = load("gpu_page")
    one = {"entries": 65536, "rows": 2, "nbytes": 512 << 20, "rate": 3.5e12, "error": 0.0, "call_us": 400.0}
    small = one | {"entries": 4096, "rows": 1, "nbytes": 16 << 20}
    lines = [
        one | {"reader": "semkv", "us": 150.0, "share": 0.85},
        one | {"reader": "SDPA", "us": 130.0, "share": 0.98},
        small | {"reader": "semkv", "us": 60.0, "share": 0.1},
        small | {"reader": "SDPA", "us": 30.0, "share": 0.2},
        one | {"reader": "semkv, exact and coarse", "us": 300.0, "share": 0.5},
    ]
    report = {"lines": lines, "shape": [32, 8, 128], "dtype": "bfloat16", "copy_bandwidth": 4.2e12}
    text = "\n".join(page.kernels_part(report))
    assert "from 256 MiB on: **met**" in text
    assert "times the best other's time: **missed**" in text
    assert "| 65,536 | 2 | 512 | 150 | 3500 | 85 | 130 | 1.15 | 400 |" in text


def test_the_page_shows_the_fastest_layout_of_a_shape(load):
    page = load("gpu_page")
    shape = {"entries": 65536, "rows": 2, "coarse": 0}
    layout = {"block": 64, "warps": 4, "stages": 3, "registers": 255, "splits": 32}
    rows = [shape | {"reader": "SDPA", "us": 125.0}]
    rows += [
        shape | {"reader": "semkv", "us": us} | layout | {"block": block} for us, block in ((200.0, 64), (150.0, 128))
    ]
    text = "\n".join(page.layouts_part({"shape": [32, 8, 128], "dtype": "bfloat16", "rows": rows}, 4e12))
    assert "| 65,536 | 2 | - | 150.0 | 125.0 | 1.20 | 89 | 128 entries, 4 warps" in text
    assert "200.0" not in text


def test_the_page_sets_steps_beside_the_models_own(load):
    page = load("gpu_page")
    cell = {"name": "DynamicCache", "tokens": 32768, "rows": 1, "budget": None, "steps": 24}
    told = {
        "missing": None,
        "first_ms": None,
        "median_ms": 30.0,
        "p99_ms": 31.0,
        "busy_ms": 28.0,
        "floor_ms": 6.0,
        "device_bytes": 1 << 30,
        "moved_bytes": 0.0,
        "overlap": None,
    }
    own = told | {
        "cell": cell | {"name": "sekv", "budget": 0.1},
        "median_ms": 10.0,
        "overlap": 0.9,
        "moved_bytes": 2 << 20,
    }
    gone = told | {"cell": cell | {"name": "sentencekv"}, "missing": "the deadline had passed"}
    report = {"model": {"num_hidden_layers": 4}, "dtype": "bfloat16", "results": [told | {"cell": cell}, own, gone]}
    text = "\n".join(page.steps_part(report))
    assert "| sekv | 32,768 | 1 | 10 % | 10.00 | 31.00 | 28.00 | 6.00 | 3.0 | 1,024 | 2.0 | 90 |" in text
    assert "Not measured: sentencekv, 32,768 tokens (the deadline had passed)." in text
