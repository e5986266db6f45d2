"""States of requests that ended, for others whose text goes on from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semkv.runtime.state import State

MEMORY = ("device", "window", "resident", "reserved", "host", "recurrent")
"""Of a state's bytes, those that are in memory."""


@dataclass(frozen=True)
class Session:
    """What a request left. ids: all tokens that its state has read."""

    ids: tuple[int, ...]
    state: State
    nbytes: int


class Sessions:
    """Ended requests' states within `most` bytes, those that were of use last. release: lets go of a state."""

    def __init__(self, most: int, release: Callable[[State], None]) -> None:
        self.most = most
        self.release = release
        self.held: OrderedDict[tuple[int, ...], Session] = OrderedDict()
        self.taken = self.tokens = 0
        """Requests that went on from a state so far, and the tokens that they did not read."""

    @property
    def nbytes(self) -> int:
        return sum(session.nbytes for session in self.held.values())

    def keep(self, ids: Sequence[int], state: State) -> None:
        """Take over a state, or let go of it where it is larger than all that there is for them."""
        held = state.nbytes
        session = Session(tuple(ids), state, sum(held[where] for where in MEMORY))
        before = self.held.pop(session.ids, None)
        if before is not None:
            self.release(before.state)
        if session.nbytes > self.most or not session.ids:
            self.release(state)
            return
        self.held[session.ids] = session
        while self.nbytes > self.most:
            self.release(self.held.popitem(last=False)[1].state)

    def longest(self, ids: Sequence[int]) -> Session | None:
        """The session with the longest text that `ids` begin with and go beyond; it stays, for the next one."""
        text = tuple(ids)
        found = [one for one in self.held.values() if len(one.ids) < len(text) and text[: len(one.ids)] == one.ids]
        if not found:
            return None
        best = max(found, key=lambda one: len(one.ids))
        self.held.move_to_end(best.ids)
        self.taken, self.tokens = self.taken + 1, self.tokens + len(best.ids)
        return best

    def clear(self) -> bool:
        """Let go of all of them; whether there were any."""
        states = [session.state for session in self.held.values()]
        self.held.clear()
        for state in states:
            self.release(state)
        return bool(states)


__all__ = ["Session", "Sessions"]
