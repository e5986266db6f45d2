"""Answers that say which tokens their states are to read, so that those of several states may be read in the same decode steps."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from semkv.evaluation.subject import Subject

Result = TypeVar("Result")


@dataclass(frozen=True)
class Feed:
    """Tokens `ids`, at least one, that `state` is to read next."""

    state: Any
    ids: tuple[int, ...]


class Heard(NamedTuple):
    """Logits [vocab] behind those tokens, and the microseconds that they took; of a step of several states, each one's share."""

    logits: Tensor
    microseconds: float


Talk = Generator[Feed, Heard, Result]
"""An answer: it yields what its state is to read, and is sent what was heard."""


class _Turn:
    """A talk and what it waits for. feed: None when it is over; left: the tokens of `feed` that were not read yet."""

    def __init__(self, talk: Talk[Any]) -> None:
        self.talk = talk
        self.result: Any = None
        self.feed: Feed | None = None
        self._go_on(None)

    def _go_on(self, heard: Heard | None) -> None:
        try:
            feed = next(self.talk) if heard is None else self.talk.send(heard)
            self.feed, self.left, self._spent = feed, feed.ids, 0.0
        except StopIteration as end:
            self.feed, self.result = None, end.value

    @property
    def state(self) -> Any:
        """What the tokens are for."""
        assert self.feed is not None
        return self.feed.state

    def reads_alone(self, compiled: Any) -> bool:
        """Whether what is left is read otherwise than a token at a time, or somebody watches the state."""
        at_once = len(self.left) > 1 and compiled.tokens_at_once(len(self.left)) > 1
        return at_once or self.state.watch is not None

    def read(self, count: int, heard: Heard) -> None:
        """`count` tokens were read."""
        self.left, self._spent = self.left[count:], self._spent + heard.microseconds
        if not self.left:
            self._go_on(Heard(heard.logits, self._spent))


def talk_together(subject: Subject, compiled: Any, talks: Sequence[Talk[Result]], rows: int) -> list[Result]:
    """Bring talks over different states to their ends, `rows` of them at a time, and return what they return: a token of each in every
    step. Each hears what it would hear alone, within rounding. Texts that `compiled` reads several tokens at a time are read alone, as
    are watched states."""
    turns: list[_Turn] = []
    while True:
        waiting = [turn for turn in turns if turn.feed is not None]
        while len(waiting) < rows and len(turns) < len(talks):
            turns.append(_Turn(talks[len(turns)]))
            waiting += [turns[-1]] if turns[-1].feed is not None else []
        if not waiting:
            return [turn.result for turn in turns]
        lonely = waiting if len(waiting) == 1 else [turn for turn in waiting if turn.reads_alone(compiled)]
        for turn in lonely:
            turn.read(len(turn.left), Heard(*subject.extend(compiled, turn.state, turn.left)))
        stepping = [turn for turn in waiting if turn not in lonely]
        if stepping:
            states, ids = [turn.state for turn in stepping], [turn.left[0] for turn in stepping]
            logits, elapsed = subject.step(compiled, states, ids)
            for turn, own in zip(stepping, logits):
                turn.read(1, Heard(own, elapsed / len(stepping)))


__all__ = ["Feed", "Heard", "Talk", "talk_together"]
