"""Rows of processes that share a model: what hangs is said, and what was not begun is left for the next run."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_job_without_a_result_has_failed_and_those_behind_it_have_no_row(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])  # what the processes import from
    from benchmarks.quality import among_ranks

    rows = among_ranks.run([("llama", "full"), ("llama", "snapkv")], 2, 0.2)
    assert rows == {("llama", "full"): {"status": "failed", "reason": "no result within 0.2 s"}}


def test_what_one_process_differs_by_itself_explains_a_row_of_float32(monkeypatch, tmp_path):
    from benchmarks.quality import among_ranks

    row = {"status": "differs", "ranks_bit_equal": True, "difference": 1e-3}
    monkeypatch.setattr(among_ranks, "rounding", lambda name, method, profile, enough: 9.5e-4)
    for single, status in ((True, "rounding"), (False, "differs")):
        monkeypatch.setattr(among_ranks, "is_single", lambda name, single=single: single)
        assert among_ranks.explained("llama", "quest", row, str(tmp_path))["status"] == status
    monkeypatch.setattr(among_ranks, "is_single", lambda name: True)
    assert among_ranks.explained("llama", "quest", row | {"difference": 2e-3}, "")["status"] == "differs"
    assert among_ranks.explained("llama", "quest", row | {"ranks_bit_equal": False}, "")["status"] == "differs"


def test_float32_inside_of_float64_is_found(monkeypatch):
    """Llama's norms compute in it; GPT-2 does not."""
    import torch

    from benchmarks.quality import among_ranks

    monkeypatch.setattr(among_ranks, "dtype_of", lambda name: torch.float64)
    assert among_ranks.is_single("llama")
    assert not among_ranks.is_single("gpt2")


def test_the_fairest_division_of_heads():
    """Against all deals; an odd head goes to either, a head alone leaves nothing to divide."""
    from itertools import combinations, product

    from benchmarks.quality.among_ranks import fairest

    for heads in ([[10, 1], [3, 4]], [[9, 2, 2], [1, 1]], [[5, 5, 1, 1], [7, 2, 2, 1], [3, 3]], [[12]]):
        sizes = [{len(store) // 2, len(store) - len(store) // 2} for store in heads]
        halves = [
            [own for size in own_sizes for own in combinations(store, size)] for store, own_sizes in zip(heads, sizes)
        ]
        every = sum(map(sum, heads))
        first = [sum(map(sum, deal)) for deal in product(*halves)]
        assert fairest(heads) == min(max(own, every - own) for own in first) / every
    assert fairest([[10, 1], [3, 4]]) == 13 / 18
    assert fairest([[12]]) == 1
