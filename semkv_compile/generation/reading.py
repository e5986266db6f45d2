"""The steps of a compiled model on explicit states: reading prompts, compressing them, adding tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import semkv.kernels  # noqa: F401 - registers the operators
from semkv.compiler.kernel_builds import as_run
from semkv.errors import BatchError, ConfigError, InputError, SemkvError
from semkv.generation.input_ids import check_vocabulary, real_tokens
from semkv.generation.prompt_inputs import PromptInputs
from semkv.ir.program import Program
from semkv.runtime.budgets.costs import waiting_cost_bytes
from semkv.runtime.decode.steps import extend, prefill_row
from semkv.runtime.host.heap import return_freed
from semkv.runtime.modes import undisturbed
from semkv.runtime.prompt.content import Content
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State

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


class Reader(PromptInputs):
    """What reads text into states: a program, how its memory is laid out, and the settings of both."""

    @cached_property
    def _running(self) -> Program:
        """`program` with what only this process can run; made for the first step."""
        return as_run(self.program, self.settings.kernels, self.device, cuda_graphs=self.settings.records(self.device))

    # -- checks --------------------------------------------------------------------------------------------------------

    def _checked_rows(
        self, ids: Tensor, attention_mask: Tensor | None, state: State | None, *, known: bool = True
    ) -> tuple[Tensor, list[Tensor]]:
        """Ids [B, T] on the device, and each row's real tokens int64 [n]; refused where `state`, or the context, has no room for them.
        known: whether all of them are ids."""
        rows = real_tokens(ids, attention_mask)
        if known:
            check_vocabulary(rows, self.program.vocab_size)
        ids, rows = ids.to(self.device, torch.int64), [row.to(self.device, torch.int64) for row in rows]
        past = [0] * len(rows)
        if state is not None:
            self._check_state(state, len(rows))
            past = [length + (state.pending is not None) for length in state.lengths]
        self._check_context(max(before + len(row) for before, row in zip(past, rows)))
        return ids, rows

    def _check_context(self, tokens: int) -> None:
        """Raise `InputError` where a row of so many tokens is longer than the model's context."""
        limit = self.program.max_positions
        if limit is not None and tokens > limit:
            raise InputError(
                f"{tokens} tokens do not fit the model's context of {limit}: shorten the prompt or the generation"
            )

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

    def _read(
        self,
        ids: Tensor,
        *,
        surprisal: bool,
        all_queries: bool = False,
        logits: int = 1,
        content: Content | None = None,
    ) -> RowRecord:
        """Run a prompt ids int64 [n] on the model's device, in chunks, with logits after its last `logits` tokens. content: what its tokens
        are besides."""
        self.placement.tier.check(self._host_nbytes(len(ids)), f"a prompt of {len(ids)} tokens")
        record = prefill_row(
            self.program,
            ids,
            self.placement.budget.dtype,
            surprisal=surprisal,
            all_queries=all_queries,
            chunk=self.prompt_chunk,
            tier=self.placement.tier,
            logits=logits,
            content=content,
        )
        record.model, record.weights = self.fingerprint, self.placement.weights
        return record

    @property
    def prompt_chunk(self) -> int:
        """Tokens of a prompt that run at once."""
        return self.settings.prefill_chunk or (PREFILL_CHUNK_CUDA if self.device.type == "cuda" else PREFILL_CHUNK)

    def _host_nbytes(self, tokens: int) -> int:
        """Bytes of the host that reading a prompt takes at most: its keys and values, and what is folded of them."""
        placement = self.placement
        token = max(placement.budget.dtype.itemsize, self.dtype.itemsize)
        read = sum(store.values_per_token * token for store in placement.program.stores)
        waiting = sum(
            waiting_cost_bytes(part.site(store), part.components, placement.budget.dtype)
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
        records = [record] if isinstance(record, RowRecord) else record
        if not isinstance(records, (list, tuple)) or not all(isinstance(one, RowRecord) for one in records):
            raise InputError(
                f"compress takes a record of `prefill_record`, or a list of them, got a {type(record).__name__}"
            )
        return self._state(list(records), release=release)

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
    def prefill(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **brought: Any) -> State:
        """Read prompts [B, T] (padded on either side where `attention_mask` says so) and return their state.

        brought: `inputs_embeds` in the place of ids, `position_ids`, `layer_inputs`, and inputs of the model such as `pixel_values`; see
        `semkv.generation.prompt_inputs`.

        Each row runs alone and without its padding, so that its tokens cannot depend on its neighbours; rows that are the same are
        read once. Raises `BatchError`, with the state of the others, where some of several rows cannot be read.
        """
        self._follow()
        ids, contents = self._given("prefill", input_ids, attention_mask, self._only_brought("prefill", brought))
        ids, rows = self._checked_rows(ids, attention_mask, None, known=contents is None)
        self._check_places(brought, ids, attention_mask, [0] * len(rows))
        made, where = self._read_prompts(rows, [1] * len(rows), contents)
        return made.for_rows(where)

    def _read_prompts(
        self, rows: list[Tensor], logits: list[int], contents: list[Content] | None = None
    ) -> tuple[Prompts, list[int]]:
        """Read prompts [n], each of those that differ once, with logits after the last so many tokens of each, and the place of each row
        among them. contents: what the tokens of each are besides ids; then each is read."""
        plan, errors = self.placement.plan, {}
        made: dict[bytes, tuple[int, State, Tensor]] = {}
        where: list[int] = []
        for index, (row, count) in enumerate(zip(rows, logits)):
            key = row.cpu().numpy().tobytes() if contents is None else str(index).encode()
            try:
                if key not in made:  # a record at a time
                    record = self._read(
                        row,
                        surprisal=plan.reads_surprisal,
                        all_queries=plan.reads_queries,
                        logits=count,
                        content=None if contents is None else contents[index],
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
        self,
        state: State,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        all_logits: bool = False,
        **brought: Any,
    ) -> Tensor:
        """Add tokens [B, T] to the rows of `state`, in place: a next turn, or a question after compression. brought: as in `prefill`.

        Returns logits [B, 1, vocab] after each row's last token, or [B, T, vocab] with `all_logits` (unpadded rows only).
        """
        self._follow_for(input_ids)
        self._check_state(state)
        with state.in_use():
            brought = self._only_brought("extend", brought)
            ids, contents = self._given("extend", input_ids, attention_mask, brought, state.next_rotary)
            ids, rows = self._checked_rows(ids, attention_mask, state, known=contents is None)
            self._check_places(brought, ids, attention_mask, state.next_places)
            if all_logits and len({len(row) for row in rows}) > 1:
                raise InputError("all_logits needs rows of one length")
            return torch.stack(self._extend_turn(state, rows, contents, all_logits=all_logits))

    def _extend_turn(
        self, state: State, rows: list[Tensor], contents: list[Content] | None, *, all_logits: bool = False
    ) -> list[Tensor]:
        """`_extend_rows` of the tokens of a turn, behind the one that was pending. contents: what those of each row are besides ids."""
        if contents is None:
            return self._extend_rows(state, *state.with_pending(rows), all_logits=all_logits)
        if any(content.blocks for content in contents):
            raise ConfigError(
                "images of this model attend both ways, which a compressed memory cannot: pass them in the prompt that begins the row"
            )
        if state.pending is not None:
            self._extend_rows(state, list(state.pending.to(self.device)))
        return self._extend_rows(state, rows, all_logits=all_logits, contents=contents)

    def _extend_rows(
        self,
        state: State,
        rows: list[Tensor],
        unread: int = 0,
        *,
        all_logits: bool = False,
        contents: list[Content] | None = None,
    ) -> list[Tensor]:
        """Add tokens int64 [n] to each row, the first `unread` of them from before; a row without any stays as it is. contents: what they
        are besides ids.

        Returns the logits [n - unread, vocab] of each row where `all_logits`, else [1, vocab] after its last token.
        """
        before = state.lengths
        counts = [len(row) for row in rows]
        state.check_room(counts)
        try:
            exact = self.settings.extend_chunk or UNCAPPED_CHUNK
            if contents is None and len(set(counts)) == 1 and counts[0] and state.alike(counts[0]):
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
                    own = None if contents is None else contents[index]
                    made = extend(
                        self._running, one, row[None], chunk, exact_chunk=exact, all_logits=all_logits, content=own
                    )[0]
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
