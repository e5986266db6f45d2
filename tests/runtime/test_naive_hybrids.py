"""Hybrid models under compression, against the model itself with a naive memory; see benchmarks/quality/hybrids.py."""

from __future__ import annotations

import json

import pytest

import semkv

FAMILIES = ("qwen3_5", "qwen3_next", "nemotron_h", "lfm2", "granitemoehybrid", "falcon_h1", "kimi_linear")


@pytest.fixture(scope="module")
def hybrids():
    from benchmarks.quality import hybrids

    return hybrids


@pytest.fixture(scope="module")
def small(hybrids):
    model = hybrids.hybrid("lfm2")
    return semkv.compile(model, method="full", config=semkv.CompileConfig(kernels="torch")), model


@pytest.mark.parametrize(
    ("method", "budget"),
    [("streaming_llm", 0.1), ("snapkv", 0.1), ("quest", 0.5), ("sekv", 0.5), ("sekv, untrained", 0.5)],
)
def test_turns_forks_and_loaded_states_are_the_references(hybrids, small, method, budget):
    row = hybrids.examine("lfm2", *small, method, budget, prompts=(420, 377), answer=4, forced=6)
    assert not row["wrong"]
    assert row["difference"] < hybrids.TOLERANCE[method] < hybrids.NOTICED < row["change"]
    held, recurrent = row["nbytes"], sum(site.nbytes for site in small[0].program.recurrences)
    assert 0 < held["peak"] <= budget * row["full_bytes"]
    assert held["recurrent"] == row["after_prompt"]["recurrent"] == 2 * recurrent > 0
    assert (held["host"] > 0) == (method not in ("streaming_llm", "snapkv"))


def test_another_budget_is_noticed(hybrids, small, monkeypatch):
    own = hybrids.Conversation
    monkeypatch.setattr(hybrids, "Conversation", lambda model, method, budget: own(model, method, 0.8 * budget))
    row = hybrids.examine("lfm2", *small, "snapkv", 0.1, prompts=(420,), answer=4, forced=6)
    assert any("logits differ by" in what for what in row["wrong"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_method_and_budget(hybrids, family):
    model = hybrids.hybrid(family)
    full = semkv.compile(model, method="full")
    for method in hybrids.METHODS:
        for budget in hybrids.BUDGETS:
            assert not hybrids.examine(family, full, model, method, budget)["wrong"]


def test_published_results_hold(hybrids):
    rows = json.loads((hybrids.RESULTS / "hybrids.json").read_text())["rows"]
    wanted = {(family, method, budget) for family in FAMILIES for method in hybrids.METHODS for budget in (0.5, 0.1)}
    assert {(row["family"], row["method"], row["budget"]) for row in rows} == wanted
    assert not [row for row in rows if row["wrong"] or not row["nbytes"]["recurrent"]]
    assert all(row["nbytes"]["peak"] <= row["budget"] * row["full_bytes"] for row in rows)
