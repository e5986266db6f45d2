"""Each row of a left-padded batch gives the tokens that it gives alone, whatever the method."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from semkv.methods import METHODS
from tests.conftest import quick_ones

LENGTHS = (190, 131, 163, 144)
NEW = 8
BUDGET = 0.4

# What differs from the method's own options at BUDGET: smallest sizes, or settings under which more of the method runs.
SETTINGS: dict[str, tuple[float | None, dict[str, Any]]] = {
    "full": (None, {}),
    "quest": (0.6, {}),
    "infllm": (0.8, {"block": 8}),
    "clusterkv": (0.9, {"tokens_per_cluster": 12, "fixed_share": 0.6, "bits": 4}),
    "heterocache": (0.8, {"tau_similar": 0.05, "tau_stable": 0.001, "every": 2, "tau_drift": 0.9}),
    "omnikv": (0.8, {"filter_layers": (0,)}),
    "specontext": (0.6, {}),
}
OTHERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "sekv, thresholds only": ("sekv", BUDGET, {"fill": False}),
    "sekv, factored": ("sekv", BUDGET, {"forms": "factored"}),
    "compresskv, recoverable": ("compresskv", BUDGET, {"recoverable": True}),
    "sentencekv, recoverable": ("sentencekv", BUDGET, {"recoverable": True}),
    "sentencekv, chunks": ("sentencekv", BUDGET, {"buckets": "chunks", "query": "token"}),
    "heterocache, strict": (
        "heterocache",
        BUDGET,
        {"strict": True, "uniform": True, "tau_similar": 0.05, "every": 2, "tau_drift": 0.9},
    ),
    "specontext, strict": ("specontext", 0.5, {"strict": True}),
    "omnikv, strict": ("omnikv", BUDGET, {"strict": True, "filter_layers": (0,)}),
    "heterocache, anchors": ("heterocache", BUDGET, {"uniform": True, "tau_stable": 0.001, "tau_similar": 1.0}),
    "heterocache, recoverable": (
        "heterocache",
        BUDGET,
        {"uniform": True, "tau_stable": 0.001, "tau_similar": 1.0, "recoverable": True},
    ),
}
SERVED = [name for name, method in METHODS.items() if not method.needs_indexer]
CASES = {name: (name, *SETTINGS.get(name, (BUDGET, {}))) for name in SERVED} | OTHERS


@pytest.fixture(scope="module")
def rows(random_ids) -> list[Tensor]:
    return [random_ids(length, length) for length in LENGTHS]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, longest], padding on the left."""
    longest = max(map(len, rows))
    fill = [torch.zeros(longest - len(row), dtype=torch.int64) for row in rows]
    ids = torch.stack([torch.cat(pair) for pair in zip(fill, rows)])
    mask = torch.stack([torch.cat([zeros, torch.ones_like(row)]) for zeros, row in zip(fill, rows)])
    return ids, mask


QUICK = (
    "full",
    "streaming_llm",
    "snapkv",
    "sekv",
    "quest",
    "clusterkv",
    "sketch",
    "h2o",
    "pyramidkv",
    "cake",
    "compresskv",
    "sentencekv",
    "heterocache",
    "omnikv",
    "specontext",
    "mixed",
)
"""One of each method whose rows differ in kind; the others run with the slow tests."""


def generated(compiled, ids: Tensor, mask: Tensor | None = None) -> list[list[int]]:
    """The new tokens of each row."""
    mask = torch.ones_like(ids) if mask is None else mask
    out = compiled.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("case", quick_ones(CASES, QUICK))
def test_a_row_gives_what_it_gives_alone(tiny, rows, case):
    name, budget, options = CASES[case]
    compiled = tiny.with_method(name, budget, **options)
    alone = [generated(compiled, row[None])[0] for row in rows]
    ids, mask = padded(rows)
    assert generated(compiled, ids, mask) == alone
    # The control: tokens that would tell if padding were read, and a memory that holds less than everything.
    unmasked = generated(compiled, ids)
    assert unmasked[0] == alone[0]
    assert sum(got != own for got, own in zip(unmasked, alone)) >= 2
    state = compiled.prefill(rows[0][None])
    assert state.nbytes["device"] < 0.85 * state.full_bytes or budget is None


@pytest.mark.parametrize("case", quick_ones(["sekv", "heterocache", "specontext, strict", "omnikv"], ["heterocache"]))
def test_rows_that_a_program_takes_one_at_a_time(tiny, rows, case):
    """Where a model lets rows influence each other (some mixtures of experts), each runs alone: a step begins once for each."""
    name, budget, options = CASES[case]
    one_by_one = copy.copy(tiny)
    object.__setattr__(one_by_one, "_source", tiny._source.evolve(batched=False))
    compiled = one_by_one.with_method(name, budget, **options)
    assert not compiled.program.batched
    alone = [generated(tiny.with_method(name, budget, **options), row[None])[0] for row in rows]
    state = compiled.prefill(*padded(rows))
    got = []
    for _ in range(NEW):
        got.append(state.logits.argmax(-1))
        compiled.extend(state, got[-1][:, None])
    assert torch.stack(got, 1).tolist() == alone
    assert state.stats.steps == NEW


def test_the_tokens_depend_on_the_beginning_of_the_prompt(tiny, rows):
    """Or equal rows would prove nothing."""
    first = [generated(tiny, row[None])[0] for row in rows]
    changed = [generated(tiny, torch.cat([row[:1] % 50 + 2, row[1:]])[None])[0] for row in rows]
    assert all(len(set(made)) > 3 for made in first)
    assert all(before != after for before, after in zip(first, changed))
    assert len({tuple(made) for made in first}) == len(rows)
