"""Requests of an engine on a compiled model: prompts in pieces, one step for all that decode, failures one by one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from semkv.errors import CapacityError, StateError, StepError
from semkv.generation.prompt import Prompt
from semkv.runtime.host.heap import return_freed
from semkv.runtime.state import State

from .sessions import Sessions

logger = logging.getLogger(__name__)


class Compiled(Protocol):
    """What is asked of a compiled model; see `semkv.generation.engine_steps`."""

    def begin(self, tokens: int | None = None) -> Prompt: ...

    def step(self, states: Sequence[State], input_ids: Tensor) -> Tensor: ...

    def extend(self, state: State, input_ids: Tensor) -> Tensor: ...

    def release(self, request: State | Prompt) -> None: ...


@dataclass(frozen=True)
class Row:
    """Tokens of one request in the ids of a batch, which hold one request's behind another's.

    slot: of the request. start, end: where its tokens are. place: of the first of them in the request's text.
    """

    slot: int
    start: int
    end: int
    place: int


@dataclass
class Request:
    """A request from its admission to its end.

    prompt: tokens that are compressed, together, when the last of them is read. known: tokens that the engine has before it samples the
    next one; more than `prompt` where a request that was preempted is read again, or goes on from a session, which has read `prompt`
    tokens. all_logits: whether each token's logits are wanted. ids: tokens that were read, where sessions are kept.
    """

    name: str
    slot: int
    prompt: int
    known: int
    all_logits: bool
    reading: Prompt | None = None
    state: State | None = None
    read: int = 0
    failed: bool = False
    ids: list[int] = field(default_factory=list)

    @property
    def held(self) -> State | Prompt | None:
        """What has memory."""
        return self.reading if self.state is None else self.state


class Requests:
    """The requests that an engine runs now, by the slots that it gave them. What one of them fails with is nobody else's concern.

    keep: bytes for states of requests that ended, from which others go on whose text begins with all that such a state has read. They
    read what is left of their prompt as `extend` does, over a memory that was compressed before; without them a prompt is compressed whole.
    """

    def __init__(self, compiled: Compiled, keep: int = 0) -> None:
        self.compiled = compiled
        self.sessions = Sessions(keep, compiled.release) if keep else None
        self._by_name: dict[str, Request] = {}
        self._by_slot: dict[int, Request] = {}
        self._failed: list[str] = []
        self.steps = self.stepped_rows = 0
        """Steps so far, and the rows in them together."""

    def __len__(self) -> int:
        return len(self._by_name)

    def begin(
        self,
        name: str,
        slot: int,
        *,
        prompt: int,
        known: int | None = None,
        all_logits: bool = False,
        ids: Sequence[int] | None = None,
    ) -> None:
        """Take up a request; one of the same name, or in the same slot, has ended. known: default, `prompt`. ids: of the prompt, where
        it may go on from a session."""
        self.end([name])
        before = self._by_slot.get(slot)
        if before is not None:
            self.end([before.name])
        request = Request(name, slot, prompt, prompt if known is None else known, all_logits)
        self._by_name[name] = self._by_slot[slot] = request
        try:
            self._start(request, ids)
        except Exception as error:
            self._fail(request, error)

    def _start(self, request: Request, ids: Sequence[int] | None) -> None:
        """From a session, or from nothing; where there is no room beside the sessions, without them."""
        try:
            session = None if self.sessions is None or ids is None else self.sessions.longest(ids)
            if session is not None and not request.all_logits:
                request.state, request.prompt = session.state.fork(), len(session.ids)
            else:
                request.reading = self.compiled.begin(request.prompt)
        except CapacityError:
            if self.sessions is None or not self.sessions.clear():
                raise
            request.reading = self.compiled.begin(request.known)

    def end(self, names: Sequence[str], keep: bool = False) -> None:
        """Let go of requests that finished, were given up, or are preempted; names that are not known are none of ours. keep: their states
        as sessions."""
        ended = [self._by_name.pop(name) for name in names if name in self._by_name]
        for request in ended:
            del self._by_slot[request.slot]
            if keep and self.sessions is not None and request.state is not None:
                self.sessions.keep(request.ids, request.state)
                request.state = None
            self._release(request)
        if ended:
            return_freed()

    def report(self) -> dict[str, int]:
        """What there is now, and the steps so far; bytes of states alone, without those of prompts that are being read."""
        states = [request.state for request in self._by_name.values() if request.state is not None]
        return {
            "requests": len(self),
            "bytes": sum(state.nbytes["device"] + state.nbytes["host"] for state in states),
            "resident": resident_bytes(),
            "steps": self.steps,
            "rows": self.stepped_rows,
            "sessions": 0 if self.sessions is None else len(self.sessions.held),
            "reused": 0 if self.sessions is None else self.sessions.tokens,
        }

    def take_failed(self) -> list[str]:
        """Requests that failed since the last call: they have nothing in memory any more, and get no tokens."""
        failed, self._failed = self._failed, []
        return failed

    def run(self, ids: Tensor, rows: Sequence[Row]) -> dict[int, Tensor]:
        """Read the tokens `ids` int64 [T] of a batch. Returns logits [vocab] by the place in `ids` of the token that they follow.

        They are there for the last token of each row, and for all of a prompt's where its request wants them; for nothing of a request
        that failed.
        """
        logits: dict[int, Tensor] = {}
        decoding: list[tuple[Request, Row]] = []
        for row in rows:
            request = self._by_slot.get(row.slot)
            if request is None:
                raise StateError(f"the batch has tokens of slot {row.slot}, and no request was begun there")
            if request.failed:
                continue
            try:
                if row.place != request.read:
                    raise StateError(
                        f"{request.read} tokens of {request.name} have been read, and the next come at {row.place}"
                    )
                if request.read < request.known:
                    self._read(request, ids[row.start : row.end], row.start, logits)
                    continue
                if row.end - row.start != 1:
                    raise StateError(
                        f"a step takes one token, and {request.name} brings {row.end - row.start}: run without speculation"
                    )
                decoding.append((request, row))
            except Exception as error:
                self._fail(request, error)
        if decoding:
            self._step(decoding, ids, logits)
        return logits

    def _read(self, request: Request, ids: Tensor, start: int, logits: dict[int, Tensor]) -> None:
        """Read tokens [t] that the engine knew before: of the prompt, which ends with its last, or behind it."""
        of_prompt = ids[: max(0, request.prompt - request.read)]
        self._note(request, ids)
        if len(of_prompt) and request.state is not None:  # a session has read them
            request.read += len(of_prompt)
        elif len(of_prompt):
            assert request.reading is not None
            made = request.reading.feed(of_prompt, all_logits=request.all_logits)
            first = start + len(of_prompt) - len(made)
            logits.update((first + place, x) for place, x in enumerate(made))
            request.read += len(of_prompt)
            if request.read == request.prompt:
                request.state, request.reading = request.reading.finish(), None
        behind = ids[len(of_prompt) :]
        if len(behind):
            assert request.state is not None
            logits[start + len(ids) - 1] = self.compiled.extend(request.state, behind[None])[0, -1]
            request.read += len(behind)

    def _step(self, decoding: list[tuple[Request, Row]], ids: Tensor, logits: dict[int, Tensor]) -> None:
        """One step for all of them; where it is refused as a whole, one for each."""
        states = [request.state for request, _ in decoding]
        places = torch.tensor([row.start for _, row in decoding], dtype=torch.int64, device=ids.device)
        errors: dict[int, Exception] = {}
        try:
            self.compiled.step(states, ids[places])
        except StepError as error:
            errors = error.errors
        except Exception as error:
            if len(decoding) > 1:
                logger.warning("a step of %d requests was refused, so each runs alone: %s", len(decoding), error)
                for one in decoding:
                    self._step([one], ids, logits)
                return
            errors = {0: error}
        self.steps, self.stepped_rows = self.steps + 1, self.stepped_rows + len(decoding)
        for number, (request, row) in enumerate(decoding):
            if number in errors:
                self._fail(request, errors[number])
                continue
            assert request.state is not None
            logits[row.start] = request.state.logits[0]
            request.read += 1
            self._note(request, ids[row.start : row.end])

    def _note(self, request: Request, ids: Tensor) -> None:
        if self.sessions is not None:
            request.ids += ids.tolist()

    def _fail(self, request: Request, error: Exception) -> None:
        logger.error("request %s failed: %s: %s", request.name, type(error).__name__, error)
        request.failed = True
        self._failed.append(request.name)
        self._release(request)

    def _release(self, request: Request) -> None:
        if request.held is not None:
            self.compiled.release(request.held)
        request.reading = request.state = None


def resident_bytes() -> int:
    """Of this process, where the system tells; else 0."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


__all__ = ["Request", "Requests", "Row"]
