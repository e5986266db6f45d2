"""What an engine that serves many users asks of a compiled model: prompts in pieces, steps over rows that come and go, bytes, release."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from semkv.errors import ConfigError, InputError, StepError
from semkv.generation.prompt import Prompt
from semkv.generation.reading import Reader
from semkv.runtime.budgets.request_bytes import RequestBytes, request_bytes
from semkv.runtime.modes import undisturbed
from semkv.runtime.state import State


class EngineSteps(Reader):
    """A `Reader` whose rows are requests: each begins, goes on, fails and ends for itself."""

    @undisturbed
    def begin(self, tokens: int | None = None) -> Prompt:
        """A prompt to be read in pieces: `feed` reads the next tokens, `finish` compresses what was read and returns its state.

        tokens: of the whole prompt, where that is known: what is read is then written where it stays, and memory is checked now; else it
        grows, and is copied at the end.

        Raises
        ------
        ConfigError: no number of tokens from 1 on. InputError: more than the model's context. CapacityError: more than the host has room
        for.
        """
        self._follow()
        if tokens is not None:
            if tokens < 1:
                raise ConfigError(
                    f"begin({tokens}): expected the number of tokens of the whole prompt, from 1 on, or None"
                )
            self._check_context(tokens)
            self.placement.tier.check(self._host_nbytes(tokens), f"a prompt of {tokens} tokens")
        return Prompt(self, tokens)

    @undisturbed
    def step(self, states: Sequence[State], input_ids: Tensor) -> Tensor:
        """Add one token to every row of several states in one step, in place: conversations of any lengths that a server decodes together.

        input_ids: int64 [B] or [B, 1], a token for each row, those of the first state first. Between steps, states come and go as the
        caller likes: each is its own before and after. Tokens that `generate` left pending are read first.

        Returns logits [B, vocab]; each state has its own as `logits`.

        Raises
        ------
        InputError, StateError, BudgetError: no states, one twice, in another thread, released or of another model, another number of ids,
            more rows than layers leave the device for; nothing is changed.
        StepError: some rows failed: an id outside of the vocabulary, no room in the context, the budget, host memory or on the disk, a step
        before that did not come to its end. All other rows have taken their token.
        """
        self._follow_for(input_ids)
        if isinstance(states, State):
            raise InputError("step takes a list of states, got one State: step([state], ids)")
        states = list(states)
        self._check_states(states)
        failed: dict[int, Exception] = {}  # by state
        rows: dict[int, list[Tensor]] = {}
        with ExitStack() as used:
            for state in states:
                used.enter_context(state.in_use())
            for number, (state, ids) in enumerate(zip(states, self._tokens_of(states, input_ids))):
                try:
                    rows[number] = self._made_ready(state, ids)
                except Exception as error:
                    failed[number] = error
            going = list(rows)
            run = self._step_together if self.program.batched else self._step_alone
            found = run([states[number] for number in going], list(rows.values())) if going else {}
            failed |= {going[place]: error for place, error in found.items()}
        logits = torch.cat([state.logits for state in states])
        if failed:
            owner = [number for number, state in enumerate(states) for _ in state.rows]
            errors = {row: failed[number] for row, number in enumerate(owner) if number in failed}
            lost = torch.tensor(list(errors), dtype=torch.int64, device=logits.device)
            raise StepError(errors, logits.index_fill(0, lost, 0))
        return logits

    def _check_states(self, states: list[State]) -> None:
        """Refuse a call over states that cannot take a token together."""
        if not states:
            raise InputError("step takes at least one state, got none")
        if len({id(state) for state in states}) < len(states):
            raise InputError("a state is given twice: each takes one token in a step; state.fork() makes a second one")
        for state in states:
            self._check_state(state)

    def _tokens_of(self, states: list[State], input_ids: Tensor) -> tuple[Tensor, ...]:
        """The ids [b, 1] of each state; a call with other ids, or of too many rows, is refused as a whole."""
        sizes = [len(state.rows) for state in states]
        if not isinstance(input_ids, Tensor) or input_ids.shape not in ((sum(sizes),), (sum(sizes), 1)):
            shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else f"are a {type(input_ids).__name__}"
            raise InputError(
                f"input_ids {shape}: the states have {sum(sizes)} rows, so a tensor [{sum(sizes)}] or [{sum(sizes)}, 1] is expected"
            )
        if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
            raise InputError(f"input_ids of {input_ids.dtype}: expected whole numbers")
        self.placement.check_rows(sum(sizes))
        return input_ids.reshape(-1, 1).split(sizes)

    def _made_ready(self, state: State, ids: Tensor) -> list[Tensor]:
        """The tokens int64 [1] of each row, for which there is room; those that were pending have been read."""
        rows = self._checked_rows(ids, None, state)[1]
        state.check_room([1 + (state.pending is not None)] * len(state.rows))
        if state.pending is not None:
            self._extend_rows(state, list(state.pending.to(self.device)))
        state.outgrow(1)
        return rows

    def _step_together(self, states: list[State], rows: list[list[Tensor]]) -> dict[int, Exception]:
        """One step over all rows of `states`; by state, why it failed. The others have their logits."""
        together = self._together(states)
        together.failures = {}
        try:
            self._extend_rows(together, [row for own in rows for row in own])
        except Exception:
            if len(together.failures) < len(together.rows):
                raise
        owner = [number for number, state in enumerate(states) for _ in state.rows]
        failed = {owner[row]: error for row, error in together.failures.items()}
        for number, (state, own) in enumerate(
            zip(states, together.logits.split([len(state.rows) for state in states]))
        ):
            if number not in failed:
                state.logits = own
        return failed

    def _step_alone(self, states: list[State], rows: list[list[Tensor]]) -> dict[int, Exception]:
        """`_step_together` for programs that run one row at a time."""
        failed: dict[int, Exception] = {}
        for number, (state, own) in enumerate(zip(states, rows)):
            try:
                self._extend_rows(state, own)
            except Exception as error:
                failed[number] = error
        return failed

    def request_bytes(self, length: int, prompt: int | None = None) -> RequestBytes:
        """The most bytes that a request of this model takes, for admission before it begins; see `RequestBytes`.

        length: its tokens in all, those that it generates included. prompt: its prompt's; None: not known yet, which is enough for
        every prompt of up to `length`.

        Raises
        ------
        ConfigError: no numbers of tokens from 1 on, or a prompt longer than `length`.
        """
        own = length if prompt is None else prompt
        if not (isinstance(length, int) and isinstance(own, int) and 1 <= own <= length):
            raise ConfigError(
                f"request_bytes({length!r}, prompt={prompt!r}): expected 1 <= prompt <= length, in tokens"
            )
        return request_bytes(self.placement, self.dtype, prompt, length)

    def release(self, request: State | Prompt) -> None:
        """Let go of all memory of a request that ended or was given up; see `State.release`. Copies of a state are not touched."""
        if not isinstance(request, (State, Prompt)):
            raise InputError(f"release takes a State or a Prompt, got {type(request).__name__}")
        request.release()


__all__ = ["EngineSteps"]
