"""No layer holds or reads more than its budget, counted from its tensors and its attention's entries; a control that the counts see."""

from __future__ import annotations

import pytest

import semkv
from semkv.methods import METHODS
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.store.roomy import SHARE
from tests.conftest import quick_ones

COMPRESSING = [name for name, method in METHODS.items() if method.compresses]
REFUSED = {("infllm", 0.05), ("clusterkv", 0.05)}
"""Budgets in which the index leaves no room for a unit."""
TOKENS, NEW = 2048, 6
QUICK = ("snapkv", "sekv", "sketch", "mixed")
"""By default; the others run with the slow tests."""


@pytest.fixture(scope="module")
def held():
    from benchmarks.quality import budget_held

    return budget_held


@pytest.fixture(scope="module")
def made(held):
    """`made(layers) -> CompiledModel`, each model once."""
    models = {
        n: held.made_once(held.bundled_model if n == 4 else lambda n=n: held.random_model(n)) for n in held.LAYERS
    }
    return lambda layers: models[layers]()


def run(held, base, name: str, budget: float, tokens: int = TOKENS, new: int = NEW) -> dict:
    compiled = base.with_method(name, budget, **held.OPTIONS.get(name, {}))
    return held.run(compiled, held.prompt_ids(tokens) % compiled.program.vocab_size, new)


def check(found: dict, budget: float) -> None:
    assert found["held"], found
    assert (
        found["reported"]["device_share"] >= found["device_share"] - 1e-9
    )  # and what is charged to the row as a whole
    assert found["reported"]["attended_share"] == pytest.approx(found["attended_share"], rel=0.08)
    assert 0 < found["reported"]["attended_share_mean"] <= found["reported"]["device_share_mean"] <= budget + 1e-9


@pytest.mark.parametrize("name", quick_ones(COMPRESSING, QUICK))
def test_every_layer_of_the_bundled_model_holds_its_budget(held, made, name):
    check(run(held, made(4), name, 0.1), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 12, 30])
@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("budget", [0.05, 0.1, 0.2])
def test_every_layer_of_deep_models_holds_its_budget(held, made, layers, name, budget):
    if (name, budget) in REFUSED or (name == "specontext" and budget == 0.05):
        with pytest.raises(semkv.BudgetError, match="too small"):
            run(held, made(layers), name, budget)
    else:
        check(run(held, made(layers), name, budget, new=40), budget)


@pytest.mark.parametrize("times", [1.1, 4])
def test_a_layer_that_reads_more_is_seen(held, made, monkeypatch, times):
    """The control: with more room in a turn than the budget leaves, the counts must exceed it."""
    allowance = RowMemory.workspace_allowance

    def more(row, store, tokens):
        caps = [row._part_cap(store, part, tokens) for part in row.placement.parts(store)]
        return [free + (times - 1) * cap for free, cap in zip(allowance(row, store, tokens), caps)]

    monkeypatch.setattr(RowMemory, "workspace_allowance", more)
    found = run(held, made(4), "sketch", 0.1)
    assert not found["held"]
    assert found["device_of_budget"] > times * (1 - 1 / SHARE)  # slots come in steps of as much
    assert found["attended_share"] > 0.09 * times - 0.035
