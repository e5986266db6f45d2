"""What else may happen in the process that a compiled model lives in: other modes, other defaults, copies, files, interrupts."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from semkv.errors import StateError
from semkv.runtime.state import State

CALLS = ("generate", "prefill", "extend", "forward", "load_state")
"""What a caller may call from inside of any mode."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def modes(rng: random.Random) -> ExitStack:
    """Some of the modes of PyTorch that belong to a thread."""
    stack = ExitStack()
    for mode in (
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ):
        if rng.random() < 0.3:
            stack.enter_context(mode())
    return stack


class Interrupts(StoppingCriteria):
    """Ctrl-C after so many tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool, device="cpu")


class Surroundings:
    """The hostile surroundings of the calls of one thread.

    rng: decides; the same numbers give the same surroundings. folder: for saved states. counts: how often each thing was done.
    """

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.folder = rng, folder
        self.numbers: Iterator[int] = itertools.count()
        self.counts = dict.fromkeys(("modes", "forked", "saved", "interrupted"), 0)
        self.inside = False

    def around(self, compiled: Any) -> Any:
        """A form of `compiled` whose calls are made from inside of other modes; what it answers is what `compiled` does."""
        form = compiled.with_method(compiled.method.name, compiled.budget)
        for name in CALLS:
            setattr(form, name, self._disturbed(form, name, getattr(form, name)))
        return form

    def _disturbed(self, form: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside or threading.current_thread() is not self.thread:
                return call(*args, **kwargs)
            self.inside = True
            try:
                with modes(self.rng):
                    self.counts["modes"] += 1
                    if name == "generate" and isinstance(kwargs.get("state"), State):
                        return self._generate(form, call, args, kwargs)
                    made = call(*args, **kwargs)
                    return self._copied(form, made) if name == "prefill" else made
            finally:
                self.inside = False

        return run

    @contextmanager
    def here(self) -> Iterator[None]:
        """The thread that is disturbed; those that a program starts itself are not."""
        self.thread = threading.current_thread()
        yield

    def _copied(self, form: Any, state: State) -> State:
        """The state, or a copy of it: of memory, or of a file."""
        way = self.rng.random()
        if way < 0.2:
            self.counts["forked"] += 1
            return state.fork()
        return self._from_file(form, state) if way < 0.4 else state

    def _from_file(self, form: Any, state: State) -> State:
        self.counts["saved"] += 1
        path = self.folder / f"{next(self.numbers)}.safetensors"
        state.save(path)
        try:
            return type(form).load_state(form, path)
        finally:
            path.unlink()

    def _generate(self, form: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Go on from a state; before it, perhaps, from copies of it, which must make the same, or are interrupted and thrown away."""
        plain = not any(kwargs.get(name) for name in ("streamer", "stopping_criteria", "do_sample"))
        way = self.rng.random()
        copy = None
        if plain and way < 0.2:
            self.counts["interrupted"] += 1
            broken = kwargs["state"].fork()
            after = self.rng.randint(1, 4)
            try:
                call(*args, **{**kwargs, "state": broken, "stopping_criteria": [Interrupts(after)]})
            except KeyboardInterrupt:
                try:
                    broken.check_whole()
                except StateError:  # said of a batch, some of whose rows had ended
                    assert len(broken.rows) > 1
        elif plain and way < 0.4:
            copy = self._from_file(form, kwargs["state"])
        made = call(*args, **kwargs)
        if copy is not None:
            again = call(*args, **{**kwargs, "state": copy})
            pair = [x if isinstance(x, Tensor) else x.sequences for x in (made, again)]
            assert torch.equal(*pair), (
                f"a copy from a file made {pair[1].tolist()}, the state itself {pair[0].tolist()}"
            )
        return made


class Chaos(threading.Thread):
    """Changes what belongs to the whole process, again and again, until it is stopped; then puts everything back."""

    def __init__(self, rng: random.Random, longest: float = 0.2) -> None:
        """longest: seconds between two changes."""
        super().__init__(daemon=True)
        self.rng, self.longest, self.ended, self.turns = rng, longest, threading.Event(), 0

    def run(self) -> None:
        changes = (
            lambda: torch.set_default_dtype(self.rng.choice(DTYPES)),
            lambda: torch.use_deterministic_algorithms(self.rng.random() < 0.5),
            lambda: torch.set_num_threads(self.rng.randint(1, 3)),
            lambda: warnings.simplefilter(self.rng.choice(("error", "default", "ignore"))),
            lambda: sys.setswitchinterval(self.rng.choice((1e-5, 1e-3, 5e-3))),
            gc.collect,
        )
        while not self.ended.wait(self.rng.uniform(0.0, self.longest)):
            self.rng.choice(changes)()
            self.turns += 1

    def stop(self) -> None:
        self.ended.set()
        self.join()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        warnings.resetwarnings()
        sys.setswitchinterval(5e-3)
