"""The steps of a compiled model on explicit states: reading prompts, compressing them, adding tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import semkv.kernels  # noqa: F401 - registers the operators
from semkv.errors import BatchError, InputError, SemkvError
from semkv.following import Following
from semkv.input_ids import check_vocabulary, real_tokens
from semkv.ir.program import Program
from semkv.kernel_builds import as_run
from semkv.runtime.costs import waiting_cost_bytes
from semkv.runtime.heap import return_freed
from semkv.runtime.modes import undisturbed
from semkv.runtime.record import RowRecord
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State
from semkv.runtime.steps import extend, prefill_row

UNCAPPED_CHUNK = 512
"""Tokens that `extend` runs at once where there is no budget."""

PREFILL_CHUNK, PREFILL_CHUNK_CUDA = 2048, 8192
"""Prompt tokens that prefill runs at once; more on CUDA, where the earlier ones cross the link for every chunk."""

QUESTION_TOKENS = 64
"""Up to as many new tokens, each chooses what it unfolds for itself."""


@dataclass(frozen=True)
class Prompts:
    """Prompts that were read: their state, and of each row the logits [n, vocab] that were asked for."""

    state: State
    last_logits: list[Tensor]

    def for_rows(self, where: list[int]) -> State:
        """The state of rows whose prompts are at these places; this one's own where no prompt stands twice."""
        return self.state if len(self.state.rows) == len(where) else self.state.select(where)


class Reader(Following):
    """What reads text into states: a program, how its memory is laid out, and the settings of both."""

    @cached_property
    def _running(self) -> Program:
        """`program` with what only this process can run; made for the first step."""
        return as_run(self.program, self.settings.kernels, self.device, cuda_graphs=self.settings.records(self.device))

    # -- checks --------------------------------------------------------------------------------------------------------

    def _checked_rows(
        self, ids: Tensor, attention_mask: Tensor | None, state: State | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Ids [B, T] on the device, and each row's real tokens int64 [n]; refused where `state`, or the context, has no room for them."""
        rows = real_tokens(ids, attention_mask)
        check_vocabulary(rows, self.program.vocab_size)
        ids, rows = ids.to(self.device, torch.int64), [row.to(self.device, torch.int64) for row in rows]
        past = [0] * len(rows)
        if state is not None:
            self._check_state(state, len(rows))
            past = [length + (state.pending is not None) for length in state.lengths]
        longest, limit = max(before + len(row) for before, row in zip(past, rows)), self.program.max_positions
        if limit is not None and longest > limit:
            raise InputError(
                f"{longest} tokens do not fit the model's context of {limit}: shorten the prompt or the generation"
            )
        return ids, rows

    # -- steps ---------------------------------------------------------------------------------------------------------

    @undisturbed
    def prefill_record(
        self, ids: Tensor, *, surprisal: bool | None = None, all_queries: bool | None = None
    ) -> RowRecord:
        """Read one prompt ids [n] or [1, n] in full: its KV on the host tier, from which `compress` makes states.

        surprisal: whether to compute it; all_queries: whether to keep every query instead of the last ones; default:
        whether this model's method needs it.
        """
        self._follow()
        ids, rows = self._checked_rows(ids[None] if ids.dim() == 1 else ids, None, None)
        if len(rows) != 1:
            raise InputError(f"a record is of one row, got {len(rows)}")
        plan = self.placement.plan
        return self._read(
            rows[0],
            surprisal=plan.reads_surprisal if surprisal is None else surprisal,
            all_queries=plan.reads_queries if all_queries is None else all_queries,
        )

    def _read(self, ids: Tensor, *, surprisal: bool, all_queries: bool = False, logits: int = 1) -> RowRecord:
        """Run a prompt ids int64 [n] on the model's device, in chunks, with logits after its last `logits` tokens."""
        self.placement.tier.check(self._host_nbytes(len(ids)), f"a prompt of {len(ids)} tokens")
        chunk = self.settings.prefill_chunk or (PREFILL_CHUNK_CUDA if self.device.type == "cuda" else PREFILL_CHUNK)
        record = prefill_row(
            self.program,
            ids,
            self.placement.budget.dtype,
            surprisal=surprisal,
            all_queries=all_queries,
            chunk=chunk,
            tier=self.placement.tier,
            logits=logits,
        )
        record.model, record.weights = self.fingerprint, self.placement.weights
        return record

    def _host_nbytes(self, tokens: int) -> int:
        """Bytes of the host that reading a prompt takes at most: its keys and values, and what is folded of them."""
        placement = self.placement
        token = max(placement.budget.dtype.itemsize, self.dtype.itemsize)
        read = sum(store.values_per_token * token for store in placement.program.stores)
        waiting = sum(
            waiting_cost_bytes(store.part(part.first, part.last, 1.0), part.components, placement.budget.dtype)
            for store in placement.budgeted
            for part in placement.parts(store)
        )
        return tokens * (read + waiting)

    @undisturbed
    def compress(self, record: RowRecord | list[RowRecord], *, release: bool = False) -> State:
        """A state of this model's method and budget from records, a row each; records serve any number of states.

        release: they serve this one only, and let go of each layer as it is built, so that both are never held in full.
        """
        self._follow()
        return self._state([record] if isinstance(record, RowRecord) else record, release=release)

    def _state(self, records: list[RowRecord], *, release: bool = False) -> State:
        """`compress` of checked records."""
        for one in records:
            self._check_weights(one.weights, "the record")
            if None not in (one.model, self.fingerprint) and one.model != self.fingerprint:
                raise InputError(
                    f"the record was made by another model ({one.model}) than this one ({self.fingerprint}): "
                    "read the prompt with `prefill_record` of a compiled form of this model"
                )
            if self.placement.plan.reads_surprisal and one.surprisal is None:
                raise InputError(
                    f"method {self.method.name!r} divides by surprisal: make the record with surprisal=True"
                )
            if self.placement.plan.reads_queries and not one.all_queries:
                raise InputError(
                    f"method {self.method.name!r} reads all queries of a prompt: make the record with all_queries=True"
                )
            if any(site not in one.features for site in self.placement.plan.features):
                # The record was made for another method, whose program does not keep hidden states.
                again = self._read(one.ids.to(self.device), surprisal=False)
                one.features.update(again.features)
        rows = [RowMemory(self.placement, one.ordered_for(self.program), release=release) for one in records]
        return_freed()
        return State(self.placement, rows, torch.stack([one.logits for one in records]))

    @undisturbed
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> State:
        """Read prompts [B, T] (padded on either side where `attention_mask` says so) and return their state.

        Each row runs alone and without its padding, so that its tokens cannot depend on its neighbours; rows that are the same are
        read once. Raises `BatchError`, with the state of the others, where some of several rows cannot be read.
        """
        self._follow()
        _, rows = self._checked_rows(input_ids, attention_mask, None)
        made, where = self._read_prompts(rows, [1] * len(rows))
        return made.for_rows(where)

    def _read_prompts(self, rows: list[Tensor], logits: list[int]) -> tuple[Prompts, list[int]]:
        """Read prompts [n], each of those that differ once, with logits after the last so many tokens of each, and the place of each row
        among them."""
        plan, errors = self.placement.plan, {}
        made: dict[bytes, tuple[int, State, Tensor]] = {}
        where: list[int] = []
        for index, (row, count) in enumerate(zip(rows, logits)):
            key = row.cpu().numpy().tobytes()
            try:
                if key not in made:  # a record at a time
                    record = self._read(
                        row, surprisal=plan.reads_surprisal, all_queries=plan.reads_queries, logits=count
                    )
                    made[key] = len(made), self._state([record], release=True), record.last_logits
                where.append(made[key][0])
            except SemkvError as error:
                if len(rows) == 1:
                    raise
                errors[index] = error
        states = [state for _, state, _ in made.values()]
        if not errors:
            return Prompts(self._together(states), [last for _, _, last in made.values()]), where
        if len(errors) == len(rows):
            raise errors[0]
        raise BatchError(errors, self._together(states).select(where))

    def _together(self, states: list[State]) -> State:
        """One state of the rows of all."""
        return State(
            self.placement, [row for one in states for row in one.rows], torch.cat([one.logits for one in states])
        )

    @undisturbed
    def extend(
        self, state: State, input_ids: Tensor, attention_mask: Tensor | None = None, *, all_logits: bool = False
    ) -> Tensor:
        """Add tokens [B, T] to the rows of `state`, in place: a next turn, or a question after compression.

        Returns logits [B, 1, vocab] after each row's last token, or [B, T, vocab] with `all_logits` (unpadded rows only).
        """
        self._follow_for(input_ids)
        self._check_state(state)
        with state.in_use():
            _, rows = self._checked_rows(input_ids, attention_mask, state)
            if all_logits and len({len(row) for row in rows}) > 1:
                raise InputError("all_logits needs rows of one length")
            return torch.stack(self._extend_rows(state, *state.with_pending(rows), all_logits=all_logits))

    @undisturbed
    def step(self, states: Sequence[State], input_ids: Tensor) -> Tensor:
        """Add one token to every row of several states in one step, in place: conversations of any lengths that a server decodes together.

        input_ids: int64 [B] or [B, 1], a token for each row, those of the first state first. Between steps, states come and go as the
        caller likes: each is its own before and after. Tokens that `generate` left pending are read first.

        Returns logits [B, vocab]. Raises `InputError`, `StateError` or `BudgetError` before anything is changed.
        """
        self._follow_for(input_ids)
        states = list(states)
        if not states:
            raise InputError("step takes at least one state, got none")
        if len({id(state) for state in states}) < len(states):
            raise InputError("a state is given twice: each takes one token in a step; state.fork() makes a second one")
        for state in states:
            self._check_state(state)
        sizes = [len(state.rows) for state in states]
        if not isinstance(input_ids, Tensor) or input_ids.shape not in ((sum(sizes),), (sum(sizes), 1)):
            shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise InputError(
                f"input_ids {shape}: the states have {sum(sizes)} rows, so [{sum(sizes)}] or [{sum(sizes)}, 1] is expected"
            )
        with ExitStack() as used:
            for state in states:
                used.enter_context(state.in_use())
            tokens = input_ids.reshape(-1, 1).split(sizes)
            rows = [row for state, ids in zip(states, tokens) for row in self._checked_rows(ids, None, state)[1]]
            for state in states:
                state.check_room([1 + (state.pending is not None)] * len(state.rows))
            together = self._together(states)
            for state in states:
                if state.pending is not None:
                    self._extend_rows(state, list(state.pending.to(self.device)))
            together.logits = torch.cat([state.logits for state in states])
            logits = torch.cat(self._extend_rows(together, rows))
            for state, own in zip(states, together.logits.split(sizes)):
                state.logits = own
            return logits

    def _extend_rows(
        self, state: State, rows: list[Tensor], unread: int = 0, *, all_logits: bool = False
    ) -> list[Tensor]:
        """Add tokens int64 [n] to each row, the first `unread` of them from before; a row without any stays as it is.

        Returns the logits [n - unread, vocab] of each row where `all_logits`, else [1, vocab] after its last token.
        """
        before = state.lengths
        counts = [len(row) for row in rows]
        state.check_room(counts)
        try:
            exact = self.settings.extend_chunk or UNCAPPED_CHUNK
            if len(set(counts)) == 1 and counts[0] and state.alike(counts[0]):
                logits = extend(
                    self._running,
                    state,
                    torch.stack(rows),
                    self.tokens_at_once(counts[0] - unread),
                    exact_chunk=exact,
                    all_logits=all_logits,
                )
                return list(logits[:, unread:] if all_logits else logits)
            parts = []
            for index, row in enumerate(rows):
                one = State(self.placement, [state.rows[index]], state.logits[index : index + 1])
                if len(row):
                    chunk = self.tokens_at_once(len(row) - unread)
                    made = extend(self._running, one, row[None], chunk, exact_chunk=exact, all_logits=all_logits)[0]
                    parts.append(made[unread:] if all_logits else made)
                else:
                    parts.append(one.logits[:0] if all_logits else one.logits)
                rows[index] = one.logits
            state.logits = torch.cat(rows)
            return parts
        finally:
            if state.lengths != before:
                state.pending = None

    def tokens_at_once(self, tokens: int) -> int:
        """Tokens of one step of an `extend` of `tokens`, at most. Where spans are unfolded, tokens of a step share the room for them, so a
        question runs one token at a time and only longer texts in chunks."""
        if self.settings.extend_chunk is not None:
            return self.settings.extend_chunk
        if not self.method.compresses:
            return UNCAPPED_CHUNK
        plan = self.placement.plan
        return 1 if plan.unfolds and tokens <= QUESTION_TOKENS else plan.fold_chunk

    def _check_state(self, state: State, rows: int | None = None) -> None:
        """Refuse what is no state of this model, or has another number of rows than the ids given with it."""
        if not isinstance(state, State):
            raise InputError(f"expected a State made by prefill, got {type(state).__name__}")
        self._check_weights(state.placement.weights, "this state")
        if state.placement.program is not self.program:
            raise InputError("this state was made by another compiled model: programs, methods and budgets must match")
        if rows is not None and rows != len(state.rows):
            raise InputError(f"{rows} rows of ids for a state of {len(state.rows)} rows")


__all__ = ["Prompts", "Reader"]
