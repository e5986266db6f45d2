"""What a journey is: a program as users write it, that a compiled model and the model itself both run, and what the two must share."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import semkv
from semkv.profiles.bundled.tasks import Haystack, make_haystack
from semkv.runtime.state import State

Result = Any
"""Numbers and texts in nested lists."""

Program = Callable[[Any, "Desk"], Result]

GREEDY: dict[str, Any] = {"do_sample": False}

BUDGET = 0.1
"""Share of the full KV that compressing methods have."""

POSITIONS = 1.04
"""Of the floor of short rows, which holds tokens with their positions: bytes of a token with its position, to those without."""

CLOSE = 1e-3
"""How far logits, in nats, and what is made of them may be apart in float32, or relative to their size where it is above one."""


@dataclass(frozen=True)
class Journey:
    """One program.

    program: runs on a compiled model. plain: the same on the model that was compiled; None: the very same function. method: what
    compresses in its second run. same: whether the answers are then the model's, too. alone: it changes what belongs to the whole
    process, captures a model or starts processes. draws: it takes numbers from torch's own generator. slow: it takes long.
    """

    name: str
    program: Program
    plain: Program | None
    method: str
    same: bool
    alone: bool
    draws: bool
    slow: bool

    def expected(self, model: Any, desk: Desk) -> Result:
        """What the model itself makes."""
        return listed((self.plain or self.program)(model, desk))

    def run(self, compiled: Any, desk: Desk) -> Result:
        """What a compiled model makes."""
        return listed(self.program(compiled, desk))


JOURNEYS: dict[str, Journey] = {}


def journey(
    method: str,
    *,
    plain: Program | None = None,
    same: bool = False,
    alone: bool = False,
    draws: bool = False,
    slow: bool = False,
) -> Callable[[Program], Program]:
    """Note a program as the journey of its own name; see `Journey`."""

    def note(program: Program) -> Program:
        name = program.__name__
        JOURNEYS[name] = Journey(name, program, plain, method, same, alone, draws, slow)
        return program

    return note


def all_journeys() -> dict[str, Journey]:
    """Every journey of `programs/`, by name."""
    for path in sorted((Path(__file__).parent / "programs").glob("*.py")):
        importlib.import_module(f"programs.{path.stem}")
    return JOURNEYS


@dataclass
class Desk:
    """What a program has at hand.

    model: the one that was compiled. method, budget: of the compiled model; `full` and None for the plain model. folder: for its files.
    seed: of its texts. workers: a pool of fresh processes, where there is one.
    """

    model: Any
    words: Any
    folder: Path
    method: str = "full"
    budget: float | None = None
    seed: int = 0
    workers: Any = None

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer of its own: padding and truncation are settings of the object, which threads may not share."""
        return deepcopy(self.words)

    def ids(self, text: str, *, start: bool = True) -> Tensor:
        """int64 [1, n]; start: with the token that begins every text."""
        made = self.tokenizer(text, add_special_tokens=start)["input_ids"]
        return torch.tensor([made], dtype=torch.int64, device="cpu")

    def text(self, ids: Tensor) -> str:
        """The text of ids int64 [n]."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def haystack(self, family: str, tokens: int, questions: int = 1) -> Haystack:
        """A context of so many tokens with questions of known answers."""
        return make_haystack(family, tokens, self.seed, n_questions=questions)

    def check(self, state: State) -> None:
        """Fail where `state` holds more on the device than its budget, or the floor of short rows, allows."""
        if self.budget is None:
            return
        token = state.full_bytes / sum(state.lengths)
        floor = POSITIONS * semkv.CompileConfig().floor
        allowed = sum(max(self.budget * length, floor) for length in state.lengths)
        held = state.nbytes
        assert held["device"] <= held["peak"] <= allowed * token, (
            f"{held['device']} bytes, {held['peak']} at most, of {allowed * token:.0f} for rows of {state.lengths} tokens"
        )
        assert state.stats.peak_share <= 1.0, state.stats


class Forms:
    """The bundled model compiled by each method at 10 %, or in full: captured once, and each form made when it is first asked for."""

    def __init__(self, model: Any) -> None:
        self.made = {"full": semkv.compile(model, semkv.bundled.profile(), method="full")}
        self.lock = threading.Lock()

    def __call__(self, method: str) -> Any:
        with self.lock:
            if method not in self.made:
                self.made[method] = self.made["full"].with_method(method, BUDGET)
            return self.made[method]


def continued(model: Any, ids: Tensor, new: int, **options: Any) -> list[int]:
    """What `generate` adds to ids int64 [1, n]."""
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **(GREEDY | options))
    return out[0, ids.shape[1] :].tolist()


def refusal(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """The error of a call that has to raise one of `kind`."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected a {kind.__name__}")


def listed(result: Result) -> Result:
    """A result in lists alone, as JSON has them."""
    return json.loads(json.dumps(result))


def difference(got: Result, expected: Result, where: str = "result") -> str | None:
    """Where and how two results differ; None where they do not."""
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return f"{where}: {got!r}, expected {expected!r}"
        pairs = (difference(a, b, f"{where}[{place}]") for place, (a, b) in enumerate(zip(got, expected)))
        return next((found for found in pairs if found is not None), None)
    if isinstance(expected, float) and isinstance(got, float):
        return (
            None if abs(got - expected) <= CLOSE * max(1.0, abs(expected)) else f"{where}: {got}, expected {expected}"
        )
    return None if got == expected and type(got) is type(expected) else f"{where}: {got!r}, expected {expected!r}"
