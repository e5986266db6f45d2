"""Tensors of a memory stay where they are from step to step, so that a recorded step serves many of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import semkv
import semkv.runtime.decode.row_turns as row_turns
from semkv.profiles.bundled.tasks import make_haystack

STEPS = 48
OWN = ("recent", "kept", "slots", "waiting")
"""Parts that a step reads where they are; on another device all others are copied to the same places as long as their sizes stay."""


@pytest.fixture(scope="module")
def full() -> semkv.CompiledModel:
    model, _ = semkv.bundled.load()
    return semkv.compile(model, semkv.bundled.profile(), method="full", config=semkv.CompileConfig(floor=0))


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    _, tokenizer = semkv.bundled.load()
    text = make_haystack("dense", 2100, seed=0).context
    return tokenizer(text, return_tensors="pt").input_ids[:, :2048]


def places(turns: row_turns.Turns) -> dict[tuple[int, int, str], tuple[int, torch.Size]]:
    """Where each tensor of a step is, and its sizes, by site, part and name."""
    return {
        (site, part, name): (x.data_ptr() if name.split(".")[0] in OWN else 0, x.shape)
        for site, parts in enumerate(turns)
        for part, turn in enumerate(parts)
        for name, x in turn.tensors.items()
    }


@pytest.mark.parametrize(
    ("method", "least", "most"),
    [
        ("full", 0, 0),
        *[(name, 0, 4) for name in ("streaming_llm", "snapkv", "pyramidkv", "chunkkv", "cake", "compresskv")],
        *[(name, 0, 4) for name in ("sekv", "sketch", "mixed", "shadowkv", "specontext", "omnikv")],
        *[(name, 4, 9) for name in ("quest", "infllm", "clusterkv", "semanticache", "sentencekv")],
        ("heterocache", 10, 20),
        ("h2o", 40, STEPS),
    ],
)
def test_steps_that_find_the_memory_elsewhere(full, prompt, monkeypatch, method, least, most):
    monkeypatch.setattr("semkv.runtime.store.token_store._on_cpu", lambda x: False)  # as on another device
    options = {"strict": True} if method in ("heterocache", "omnikv") else {}
    compiled = full if method == "full" else full.with_method(method, 0.1, **options)
    state = compiled.prefill(prompt)
    for _ in range(16):
        compiled.extend(state, state.logits.argmax(-1, keepdim=True))
    seen, made = [], row_turns.turns_of

    def watched(*given):
        turns = made(*given)
        seen.append(places(turns))
        return turns

    monkeypatch.setattr(row_turns, "turns_of", watched)
    for _ in range(STEPS):
        compiled.extend(state, state.logits.argmax(-1, keepdim=True))
    assert len(seen) == STEPS
    moved = sum(before != after for before, after in pairwise(seen))
    assert least <= moved <= most
