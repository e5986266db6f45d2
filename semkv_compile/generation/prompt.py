"""A prompt that is read in pieces, with other work between them, and compressed when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from semkv.errors import InputError, StateError
from semkv.generation.input_ids import check_vocabulary, real_tokens
from semkv.runtime.decode.steps import chunks_of
from semkv.runtime.modes import undisturbed
from semkv.runtime.prompt.prefill import Prefill
from semkv.runtime.state import State

if TYPE_CHECKING:
    from semkv.generation.reading import Reader


class Prompt:
    """Made by `CompiledModel.begin`; one row, which belongs to one thread at a time.

    What is read is held in full on the host until `finish`, which compresses it: the state is that of `prefill` over all of it at
    once, but for the order of sums, wherever the pieces end. A piece that fails leaves a prompt that goes no further (`StateError`).
    """

    def __init__(self, model: Reader, tokens: int | None) -> None:
        """tokens: of the whole prompt, where that is known."""
        self._model, self._tokens = model, tokens
        self._weights = model.placement.weights
        plan = model.placement.plan
        self._reading: Prefill | None = Prefill(
            model.program,
            model.placement.budget.dtype,
            model.device,
            surprisal=plan.reads_surprisal,
            all_queries=plan.reads_queries,
            tier=model.placement.tier,
            tokens=tokens,
        )
        self._logits: Tensor | None = None
        self._why = ""

    @property
    def read(self) -> int:
        """Tokens so far; 0 once it has ended."""
        return 0 if self._reading is None else self._reading.read

    @undisturbed
    def feed(self, input_ids: Tensor | None = None, *, all_logits: bool = False, **brought: Any) -> Tensor:
        """Read the next tokens, int64 [t] or [1, t]. Returns logits [1, vocab] after the last of them, or [t, vocab] where `all_logits`.

        brought: embeddings in the place of ids, and what else `semkv.generation.prompt_inputs` tells of; each [1, t, ...].

        Raises
        ------
        InputError: ids that do not fit the vocabulary, the context, or the length that was named; nothing is read.
        CapacityError: the host has no room for them; nothing is read. StateError: the prompt has ended, or the weights have changed.
        """
        reading, model = self._open(), self._model
        model._follow_for(input_ids)
        model._check_weights(self._weights, "this prompt")
        given = model._only_brought("feed", brought)
        ids, contents = model._given("feed", self._row(input_ids), None, given, [reading.next_rotary])
        ids, content = self._checked(ids, contents is None), None if contents is None else contents[0]
        model._check_places(given, ids[None], None, [reading.read])
        self._end("a piece of it did not come to its end: begin it again")
        head, hidden = model.program.head, []
        for start, end in chunks_of(model.program, len(ids), model.prompt_chunk, content):
            part = None if content is None else content.part(start, end)
            hidden.append(reading.feed(ids[start:end], part)[:, 0 if all_logits else -1 :])
        logits = torch.cat([head(x)[0] for x in (hidden if all_logits else hidden[-1:])])
        self._reading, self._logits = reading, logits[-1]
        return logits

    @undisturbed
    def finish(self) -> State:
        """Compress what was read: its state, of one row. The prompt has ended then.

        Raises
        ------
        InputError: fewer tokens were read than it was begun with; it goes on.
        StateError: it has ended before, nothing was read, or the weights have changed. BudgetError, CapacityError: as `prefill`.
        """
        reading, model = self._open(), self._model
        model._follow()
        model._check_weights(self._weights, "this prompt")
        if not reading.read:
            raise StateError("a prompt of no tokens has no state: feed it at least one")
        if self._tokens is not None and reading.read < self._tokens:
            raise InputError(
                f"this prompt was begun with {self._tokens} tokens and has {reading.read}: feed it the rest, or release it"
            )
        self._end("it was finished: go on from its state")
        record = reading.finish()
        record.logits = self._logits
        record.model, record.weights = model.fingerprint, self._weights
        return model._state([record], release=True)

    def release(self) -> None:
        """Let go of what was read, unfinished; calling it again does nothing."""
        self._end("it was released: begin it again")

    def _open(self) -> Prefill:
        if self._reading is None:
            raise StateError(f"this prompt has ended: {self._why}")
        return self._reading

    def _end(self, why: str) -> None:
        if self._reading is not None:
            self._reading, self._why = None, why

    @staticmethod
    def _row(input_ids: Tensor | None) -> Tensor | None:
        """Ids [t] as [1, t]."""
        return input_ids[None] if isinstance(input_ids, Tensor) and input_ids.dim() == 1 else input_ids

    def _checked(self, input_ids: Tensor, known: bool) -> Tensor:
        """int64 [t] on the device. known: whether all of them are ids."""
        if isinstance(input_ids, Tensor) and input_ids.dim() == 2 and len(input_ids) != 1:
            raise InputError(f"input ids {tuple(input_ids.shape)}: a prompt is one row, begin one for each")
        model = self._model
        (row,) = real_tokens(input_ids, None)
        if known:
            check_vocabulary([row], model.program.vocab_size)
        ids = row.to(model.device, torch.int64)
        after = self.read + len(ids)
        if self._tokens is not None and after > self._tokens:
            raise InputError(
                f"{after} tokens of a prompt that was begun with tokens={self._tokens}: name its whole length"
            )
        model._check_context(after)
        if self._tokens is None:
            model.placement.tier.check(model._host_nbytes(len(ids)), f"a prompt of {after} tokens")
        return ids


__all__ = ["Prompt"]
