"""States that threads decode at the same time, in any order, give the tokens that they give alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from semkv.compiled import CompiledModel
from semkv.runtime.state import State

STATES, THREADS, STEPS = 16, 4, 8
CASES: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("sekv", 0.4, {"forms": "factored"}),
    ("sketch", 0.17, {}),
    ("mixed", 0.4, {}),
    ("specontext", 0.7, {}),
    ("heterocache", 0.5, {"strict": True, "uniform": True, "tau_similar": 0.05, "every": 2, "tau_drift": 0.9}),
    ("sentencekv", 0.4, {"recoverable": True}),
    ("h2o", 0.4, {}),
    ("quest", 0.4, {}),
)


class Decoding:
    """One state that is decoded greedily, a step at a time; `tokens` are those so far."""

    def __init__(self, compiled: CompiledModel, state: State) -> None:
        self.compiled, self.state, self.lock = compiled, state, Lock()
        self.tokens: list[int] = []

    def step(self) -> None:
        """Two threads may come for the same state: they take turns."""
        with self.lock:
            token = self.state.logits.argmax(-1, keepdim=True)
            self.tokens.append(int(token))
            self.compiled.extend(self.state, token)


@pytest.fixture(scope="module")
def models(tiny) -> list[CompiledModel]:
    return [tiny.with_method(name, budget=budget, **options) for name, budget, options in CASES]


@pytest.fixture(scope="module")
def prompts(random_ids) -> list[Tensor]:
    return [random_ids(150 + 7 * i, i)[None] for i in range(STATES)]


@pytest.fixture(scope="module")
def alone(models, prompts) -> list[list[int]]:
    """The tokens of each state, decoded before any other exists."""
    tokens = []
    for i, prompt in enumerate(prompts):
        compiled = models[i % len(models)]
        run = Decoding(compiled, compiled.prefill(prompt))
        for _ in range(STEPS):
            run.step()
        tokens.append(run.tokens)
    return tokens


@pytest.mark.parametrize("seed", range(2))
def test_threads_that_decode_states_in_random_order(models, prompts, alone, seed):
    schedule = [i for i in range(STATES) for _ in range(STEPS)]
    random.Random(seed).shuffle(schedule)
    with ThreadPoolExecutor(THREADS) as pool:
        # Prompts are read and compressed by the threads too.
        states = pool.map(lambda i: models[i % len(models)].prefill(prompts[i]), range(STATES))
        runs = [Decoding(models[i % len(models)], state) for i, state in enumerate(states)]
        for done in [pool.submit(runs[i].step) for i in schedule]:
            done.result()
    assert [run.tokens for run in runs] == alone


def test_forks_that_threads_decode_do_not_notice_each_other(models, prompts):
    compiled = models[0]
    state = compiled.prefill(prompts[0])
    forks = [Decoding(compiled, state.fork()) for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(fork.step) for _ in range(STEPS) for fork in forks]:
            done.result()
    whole = Decoding(compiled, state)
    for _ in range(STEPS):
        whole.step()
    assert all(fork.tokens == whole.tokens for fork in forks)
    assert len(set(whole.tokens)) > 1
    assert torch.isfinite(state.logits).all()
