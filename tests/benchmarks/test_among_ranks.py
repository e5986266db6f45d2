"""Rows of processes that share a model: what hangs is said, and what was not begun is left for the next run."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_first_job_without_a_result_has_failed_and_those_behind_it_have_no_row(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import among_ranks

    rows = among_ranks.run([("llama", "full"), ("llama", "snapkv")], 2, 0.2)
    assert rows == {("llama", "full"): {"status": "failed", "reason": "no result within 0.2 s"}}
