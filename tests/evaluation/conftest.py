"""A compiled model without a network: it reads the answer off the context tokens that its method kept."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.evaluation import Grid, Variant, evaluate
from semkv.profiles.bundled.grammar import ADJECTIVES, NOUNS, NUMBERS
from semkv.profiles.bundled.tokenizer import build_tokenizer

BYTES_PER_TOKEN = 64


class LookupState:
    """Tokens kept and the question so far."""

    def __init__(self, kept, length, zoom):
        self.kept, self.length, self.zoom = kept, length, zoom
        self.read, self.steps, self.logits, self.watch = [], 0, None, None

    def fork(self):
        other = LookupState(list(self.kept), self.length, self.zoom)
        other.logits = self.logits
        return other

    @property
    def nbytes(self):
        kept = len(self.kept) + len(self.read)
        return {
            "device": BYTES_PER_TOKEN * kept,
            "peak": BYTES_PER_TOKEN * kept,
            "workspace": 0,
            "window": 0,
            "reserved": 0,
            "host": BYTES_PER_TOKEN * (self.length - len(self.kept)),
            "disk": 0,
        }

    @property
    def full_bytes(self):
        return BYTES_PER_TOKEN * (self.length + len(self.read))

    @property
    def stats(self):
        rate = {1: torch.tensor([0.25, 0.0])} if self.zoom else {}
        shares = {"device_share": 0.5, "attended_share": 0.4, "device_share_mean": 0.3, "attended_share_mean": 0.2}
        shares |= {"excess_share": 0.0, "excess_share_mean": 0.0}
        return SimpleNamespace(steps=self.steps, moved_bytes_per_step=10.0, peak_share=0.5, zoom_rate=rate, **shares)


class LookupModel:
    """Answers key-value questions from the kept tokens; `log` counts prefills and compressions over all variants.

    `picky` is `tail`, and finds its budget too small for any context but the first that it sees.
    """

    methods = ("full", "tail", "head", "picky")

    def __init__(self, tokenizer, method="full", budget=None, log=None, options=None):
        if method not in self.methods:
            raise ConfigError(f"method {method!r}: expected one of {', '.join(self.methods)}")
        if method != "full" and budget is None:
            raise BudgetError(f"method {method!r} compresses and needs a budget")
        self.tokenizer, self.method, self.budget = tokenizer, method, budget
        self.options = options or {}
        self.log = {"prefill": 0, "compress": 0} if log is None else log
        self.program = SimpleNamespace(max_positions=2048)
        self.settings = CompileConfig()
        self.device = torch.device("cpu")
        self.segments = False
        self.placement = SimpleNamespace(
            plan=SimpleNamespace(reads_surprisal=False, reads_queries=False),
            budgeted=("store",),
            budget=SimpleNamespace(average_tokens=lambda tokens: budget * tokens),
            minimum_tokens=8,
        )

    def with_method(self, method, budget=None, *, config=None, **options):
        return LookupModel(self.tokenizer, method, budget, self.log, options)

    def prefill_record(self, ids, *, surprisal, all_queries):
        assert ids.shape[0] == 1
        assert surprisal == self.segments
        self.log["prefill"] += 1
        return ids[0].tolist()

    def compress(self, record):
        self.log["compress"] += 1
        if self.method == "picky" and self.log.setdefault("first", record) != record:
            raise BudgetError(f"budget {self.budget} is too small for 'picky'")
        keep = len(record) if self.method == "full" else round(self.budget * len(record))
        kept = record[:keep] if self.method == "head" else record[len(record) - keep :]
        state = LookupState(kept, len(record), self.method == "head")
        state.logits = self._logits(LookupState(record, len(record), False))  # a prefill reads everything
        return state

    def extend(self, state, ids):
        state.read += ids[0].tolist()
        state.steps += 1
        state.logits = self._logits(state)
        return state.logits[:, None]

    def tokens_at_once(self, tokens):
        return tokens

    def step(self, states, ids):
        self.log.setdefault("rows", []).append(len(states))
        return torch.cat([self.extend(state, ids[row, None, None]) for row, state in enumerate(states)])[:, 0]

    def _logits(self, state):
        logits = torch.zeros(1, len(self.tokenizer))
        logits[0, self._answer(state)] = 1.0
        return logits

    def _answer(self, state):
        words = self.tokenizer.convert_ids_to_tokens(state.kept + state.read)
        asked = words[len(state.kept) :]
        given = 0
        while given < len(asked) and asked[-1 - given] in NUMBERS:
            given += 1
        question = words[-24 : len(words) - given]
        keys = [p for p in pairwise(question) if p[0] in ADJECTIVES and p[1] in NOUNS]
        for place in range(len(words) - 8):
            if keys and tuple(words[place : place + 2]) == keys[-1]:
                numbers = [w for w in words[place + 2 : place + 7] if w in NUMBERS]
                if len(numbers) >= 3:
                    return self.tokenizer.convert_tokens_to_ids(numbers[min(given, 2)])
        return 0


@pytest.fixture(scope="session")
def tokenizer():
    """The bundled model's tokenizer."""
    return build_tokenizer()


@pytest.fixture
def lookup(tokenizer):
    """A fresh lookup model with empty counts."""
    return LookupModel(tokenizer)


@pytest.fixture
def grid():
    """Three methods, two budgets, two families, two lengths: small enough to run in a second."""
    variants = (
        Variant(method="full"),
        *(Variant(method=m, budget=b) for m in ("tail", "head") for b in (0.25, 0.5)),
    )
    return Grid(
        variants=variants, families=("single", "dense"), lengths=(128, 256), samples=10, questions_per_context=4, seed=3
    )


@pytest.fixture(scope="session")
def report(tokenizer):
    """A finished evaluation of the lookup model with every kind of figure in it."""
    variants = (
        Variant(method="full"),
        *(Variant(method=m, budget=b) for m in ("tail", "head") for b in (0.25, 0.5)),
    )
    grid = Grid(variants=variants, families=("single", "dense"), lengths=(128, 256), samples=24, seed=3)
    return evaluate(LookupModel(tokenizer), tokenizer, grid, identity="x", model="lookup")
