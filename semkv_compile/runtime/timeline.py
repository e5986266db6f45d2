"""When the layers of a state's steps took their turns, and what they waited for: recorded where a state is given one of these."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from semkv.runtime.supply import Supplied


@dataclass(frozen=True)
class Turn:
    """A layer's turn: its memory took the new tokens, chose and unfolded, from `begun` to `ended`; `took`: per row and part."""

    layer: int
    begun: float
    ended: float
    took: tuple[Supplied, ...]


@dataclass
class StepTimes:
    """A step of a state, from its token to its logits; all times in seconds of `time.perf_counter`."""

    begun: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    turns: list[Turn] = field(default_factory=list)


class Timeline:
    """The steps of a state since it was set as `State.timeline`. On CUDA the times are those of the host, which launches ahead."""

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []

    def begin_step(self) -> None:
        """A step begins."""
        self.steps.append(StepTimes())

    def end_step(self) -> None:
        """Its logits are there, or, on CUDA, launched."""
        self.steps[-1].ended = time.perf_counter()

    def turn(self, layer: int, begun: float, took: tuple[Supplied, ...]) -> None:
        """The turn of a layer that began at `begun` is over."""
        self.steps[-1].turns.append(Turn(layer, begun, time.perf_counter(), took))


__all__ = ["StepTimes", "Timeline", "Turn"]
