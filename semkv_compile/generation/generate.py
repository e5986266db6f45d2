"""A compiled model as Hugging Face's callers know models: `forward` and `generate`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from semkv.errors import BatchError, ConfigError, InputError, SemkvError
from semkv.generation.arguments import check_arguments, check_turn, given_state, new_tokens, room_for
from semkv.generation.engine_steps import EngineSteps
from semkv.generation.input_ids import in_columns, padding_mask, real_tokens
from semkv.generation.stopping import FinishedRows
from semkv.model.huggingface import CACHE
from semkv.runtime.modes import undisturbed
from semkv.runtime.prompt.content import Content
from semkv.runtime.state import State, Turn

PER_ROW = ("prefix_allowed_tokens_fn", "logits_processor", "stopping_criteria", "streamer", "custom_generate")
"""Arguments of `generate` that may know rows by their number."""


class Generation(GenerationMixin, EngineSteps):
    """`forward` and `generate` over the steps of a `Reader`."""

    main_input_name = "input_ids"
    base_model_prefix = ""
    _is_stateful = False
    _supports_cache_class = True
    _can_compile_fullgraph = False
    input_modalities = ("text",)

    generation_config: GenerationConfig

    def can_generate(self) -> bool:
        return True

    def get_experts_implementation(self) -> dict[str, str]:
        """What `generate` asks of mixtures of experts: nothing is to be switched in a program."""
        return {}

    # -- forward -------------------------------------------------------------------------------------------------------

    @undisturbed
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: State | None = None,
        cache: State | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Read ids [B, T]: a prompt where there is no state, else more tokens of its rows, in place.

        Parameters
        ----------
        attention_mask: [B, T], 0 at padding on the left or on the right; with a state also [B, past + T]. Padding is not read.
        position_ids: [B, T]; a memory counts positions itself, so these must be what it counts, from 0 at a row's first token; or rotary
            positions [axes, B, T] of a model whose positions have several axes.
        inputs_embeds: [B, T, H], in the place of ids. others: inputs of the model that was compiled, such as `pixel_values`; see
            `semkv.generation.prompt_inputs`.
        past_key_values, cache: the state, under either of the names that transformers has for it.
        labels: int64 [B, T], -100 where there is none: the output then has the `loss`, the mean cross entropy in nats of each token
            given those before it. There are no gradients.
        use_cache: False leaves the state out of the output.
        logits_to_keep: the last columns to compute logits of, 0 for all, or their indices. One: those after each row's last token.

        Returns
        -------
        logits [B, T or as many as are kept, vocab], zero at padding; the loss, and the state as cache. A prompt's logits are those of
        full attention: what was compressed is read by the tokens that follow.

        Raises
        ------
        ConfigError: an argument that a compiled model does not have; it is named. InputError: ids, mask or positions that do not fit.
        """
        brought = self._brought(others | {"inputs_embeds": inputs_embeds, "position_ids": position_ids})
        for name, value in others.items():
            if value is not None and value is not False and name not in brought:
                check_arguments("forward", {name: value}, None, None)
                raise ConfigError(
                    f"forward({name}=...): no input of this model, which reads input_ids or inputs_embeds"
                )
        state = given_state("forward", None, past_key_values, cache)
        if state is not None and state.turn is not None and input_ids is not None:  # `generate` has looked
            with state.in_use():
                logits = self._read_turn(state, state.turn, input_ids.to(self.device), attention_mask)
        else:
            self._follow_for(input_ids)
            columns = inputs_embeds if input_ids is None else input_ids
            mask = None
            if attention_mask is not None and isinstance(columns, Tensor):
                mask = attention_mask[:, -columns.shape[1] :]
            blank = state is None or not state.rows
            state = self._blank_state() if state is None else state
            with state.in_use():
                ids, contents = self._given("forward", input_ids, mask, brought, state.next_rotary or None)
                _check_labels(labels, ids, logits_to_keep)
                ids, rows = self._checked_rows(ids, mask, None if blank else state, known=contents is None)
                self._check_places(brought, ids, mask, [0] * len(rows) if blank else state.next_places)
                logits = self._read_kept(state, rows, contents, mask, logits_to_keep)
        loss = None if labels is None else _loss(logits, labels)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: None if use_cache is False else state})
        return output.to_tuple() if return_dict is False else output

    def _read_kept(
        self,
        state: State,
        rows: list[Tensor],
        contents: list[Content] | None,
        mask: Tensor | None,
        keep: int | Tensor,
    ) -> Tensor:
        """Read `rows`; logits [B, kept, vocab]."""
        last = not isinstance(keep, Tensor) and keep == 1
        if not state.rows:
            made, where = self._read_prompts(rows, [1 if last else len(row) for row in rows], contents)
            state.begin(made.for_rows(where))
            parts = [made.last_logits[index] for index in where]
        else:
            parts = self._extend_turn(state, rows, contents, all_logits=not last)
        if last:
            return torch.stack([part[-1:] for part in parts])
        logits = torch.stack(parts) if mask is None else in_columns(parts, mask)
        return logits[:, keep] if isinstance(keep, Tensor) else logits[:, -keep:] if keep else logits

    def _read_turn(self, state: State, turn: Turn, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Read the next columns int64 [B, T] of a running `generate`, which has checked them; logits [B, 1, vocab] after each row's last
        token. Rows that have finished read nothing."""
        self._check_weights(state.placement.weights, "this state")
        turn.seen += ids.shape[1]
        if not state.rows:
            rows = (
                real_tokens(ids, None if mask is None else mask[:, -ids.shape[1] :]) if turn.rows is None else turn.rows
            )
            made, where = self._read_prompts(rows, [1] * len(rows), turn.contents)
            where = [place for place in where for _ in range(len(ids) // len(rows))]  # beams and sequences of each
            turn.prompt = (made.state, where) if turn.keeps_prompt else None  # beams take copies of its rows
            state.begin(made.for_rows(where))
        elif turn.unread is not None:
            if turn.contents is None:
                self._extend_rows(state, turn.unread)
            else:
                self._extend_turn(state, turn.unread, turn.contents)
            turn.unread = None
        elif turn.finished is None or not bool(turn.finished.any()):
            self._extend_rows(state, list(ids))
        else:
            running = torch.nonzero(~turn.finished)[:, 0].tolist()
            part = State(self.placement, [state.rows[row] for row in running], state.logits[running])
            if running:
                self._extend_rows(part, list(ids[running]))
            state.logits = state.logits.clone()
            state.logits[running] = part.logits
        return state.logits[:, None]

    def _blank_state(self) -> State:
        """A state that has read nothing yet."""
        logits = torch.empty(0, self.program.vocab_size, dtype=self.dtype, device=self.device)
        return State(self.placement, [], logits)

    # -- generate ------------------------------------------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: State | None = None,
        attention_mask: Tensor | None = None,
        cache: State | None = None,
        inputs_embeds: Tensor | None = None,
        **ignored: Any,
    ) -> dict[str, Any]:
        """The columns that the state has not read yet; embeddings are in its turn."""
        state = past_key_values if cache is None else cache
        seen = 0 if state is None or state.turn is None else state.turn.seen
        mask = None if attention_mask is None else attention_mask[:, seen:]
        return {"input_ids": input_ids[:, seen:], "attention_mask": mask, CACHE: state}

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict, *ignored: Any
    ) -> None:
        """States replace caches: none is made ahead."""
        model_kwargs.setdefault(CACHE, None)

    @undisturbed
    def generate(self, inputs: Tensor | None = None, *args: Any, state: State | None = None, **kwargs: Any) -> Any:
        """Hugging Face's `generate`, with the same arguments and results.

        state: go on from this state, in place, instead of reading a prompt. `inputs` are then the new tokens, or everything again:
        ids that begin with all that the state has read are read from there on. Each row ends where it ends and reads none of its
        neighbours' padding; its last token is read by the next turn. `cache` and `past_key_values` are other names for it. With
        `return_dict_in_generate` the state comes back under the name that transformers has for the cache, a row for each sequence.

        Embeddings, images and other inputs of the model: see `semkv.generation.prompt_inputs`. With a state they are those of the new turn.

        Raises
        ------
        ConfigError: a way of decoding, or an output, that a compressed memory does not have; it is named.
        InputError: ids that do not fit the vocabulary, the context or what the state has read: before anything is read.
        BatchError: prompts of a batch that cannot be read, the others having been answered.
        Errors on the way carry the text so far as `error.sequences`, int64 [B, T]: the prompts alone before the first token.
        """
        self._follow()
        names = list(inspect.signature(GenerationMixin.generate).parameters)[2:]
        kwargs |= dict(zip(names, args))
        state = given_state("generate", state, *(kwargs.pop(name, None) for name in ("past_key_values", "cache")))
        brought = self._brought(kwargs)
        asked = check_arguments("generate", kwargs, self.generation_config, state)
        ids = inputs if inputs is not None else kwargs.pop("input_ids", None)
        embeds = brought.get("inputs_embeds")
        goes_on = state is not None
        state = self._blank_state() if state is None else state
        with state.in_use():
            mask = kwargs.get("attention_mask")
            if mask is None and isinstance(ids, Tensor) and ids.dim() == 2:
                mask = padding_mask(ids, asked("pad_token_id"), asked("eos_token_id"), right=not goes_on)
            elif mask is not None and goes_on and isinstance(columns := embeds if ids is None else ids, Tensor):
                mask = mask[:, -columns.shape[1] :]
            shown = ids
            ids, contents = self._given("generate", ids, mask, brought, state.next_rotary or None)
            ids, rows = self._checked_rows(ids, mask, None, known=contents is None)
            kwargs["attention_mask"] = mask
            pending = 0
            if goes_on:
                self._check_state(state, len(rows))
                if contents is None:
                    rows = new_tokens(rows, state)
                else:
                    check_turn(rows, state)
                    pending = int(state.pending is not None)
            lengths = [past + pending + len(row) for past, row in zip(state.lengths or [0] * len(rows), rows)]
            kwargs |= room_for(lengths, ids.shape[1], asked, self.program.max_positions)
            self._check_places(brought, ids, mask, state.next_places or [0] * len(rows))
            beams = asked("num_beams") or 1
            read = None if contents is None or goes_on else rows
            state.turn = turn = Turn(read, contents, rows if goes_on else None, keeps_prompt=beams > 1)
            if embeds is not None:  # new tokens alone come back
                kwargs |= {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids) if mask is None else mask}
                ids = ids[:, :0]
            elif contents is not None:
                ids = shown.to(ids)
            try:
                return self._generate(ids, state, turn, kwargs, beams)
            except BatchError as error:
                if contents is not None or any(kwargs.get(name) is not None for name in PER_ROW):
                    raise
                several = beams > 1 or (asked("num_return_sequences") or 1) > 1
                try:
                    error.sequences = self._generate_others(ids, error, kwargs, None if several else error.state)
                except SemkvError as other:
                    raise error from other
                raise
            finally:
                state.turn = None

    def _generate(self, ids: Tensor, state: State, turn: Turn, kwargs: dict[str, Any], beams: int) -> Any:
        """`generate` of checked arguments."""
        kwargs = {**kwargs, CACHE: state}
        if beams > 1:
            result = super().generate(ids, **kwargs)
            if not isinstance(result, Tensor):
                result[CACHE] = self._read_again(turn, result, ids.shape[1], beams)
            return result
        rows = kwargs["stopping_criteria"] = FinishedRows(kwargs.get("stopping_criteria") or [], state)
        try:
            return super().generate(ids, **kwargs)
        except BaseException as error:
            if not isinstance(error, BatchError):  # which tells by row
                error.sequences = ids if rows.ids is None else rows.ids  # type: ignore[attr-defined]
            raise
        finally:
            rows.close()

    def _generate_others(self, ids: Tensor, failed: BatchError, kwargs: dict[str, Any], state: State | None) -> Tensor:
        """The sequences [B, T] of a batch, the rows that failed being padded prompts; the others go on from `state`, where there is one."""
        good = [row for row in range(len(ids)) if row not in failed.errors]
        per_row = {
            name: x[good] if isinstance(x, Tensor) and x.dim() and len(x) == len(ids) else x
            for name, x in kwargs.items()
        }
        result = self.generate(ids[good], state=state, **per_row)
        made = result if isinstance(result, Tensor) else result.sequences
        several = len(made) // len(good)
        config = kwargs.get("generation_config") or self.generation_config
        pad = next((x for x in (kwargs.get("pad_token_id"), config.pad_token_id) if isinstance(x, int)), 0)
        sequences = made.new_full((len(ids) * several, made.shape[1]), pad)
        sequences[:, : ids.shape[1]] = ids.repeat_interleave(several, 0)
        sequences.unflatten(0, (-1, several))[good] = made.unflatten(0, (-1, several))
        return sequences

    def _read_again(self, turn: Turn, result: Any, columns: int, beams: int) -> State:
        """The state of the sequences that beam search chose, whose rows it may have given up on the way: a token at a time over the
        prompt's."""
        prompt, where = turn.prompt
        lengths = (result.beam_indices >= 0).sum(1).tolist()
        several = len(lengths) * beams // len(where)
        out = prompt.select([where[row // several * beams] for row in range(len(lengths))])
        for index, length in enumerate(lengths):
            made = result.sequences[index, columns : columns + length]
            one = State(self.placement, [out.rows[index]], out.logits[index : index + 1])
            for token in made[:-1]:
                self._extend_rows(one, [token[None]])
            out.logits[index] = one.logits[0]
        ends = [result.sequences[index, columns + length - 1] for index, length in enumerate(lengths)]
        out.pending = torch.stack(ends)[:, None].to(self.device)
        return out

    def _get_stopping_criteria(
        self, generation_config: GenerationConfig, stopping_criteria: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hugging Face's list, as one that also tells the state which rows ended."""
        criteria = super()._get_stopping_criteria(generation_config, stopping_criteria, *args, **kwargs)
        return stopping_criteria.take(criteria) if isinstance(stopping_criteria, FinishedRows) else criteria

    def _reorder_cache(self, state: State, beam_idx: Tensor) -> State:
        state.reorder_cache(beam_idx)
        return state


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats, float32, of labels int64 [B, T], each given the logits [B, T, vocab] before it; -100: no label."""
    targets = labels[:, 1:].to(logits.device).flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets, ignore_index=-100)


def _check_labels(labels: Tensor | None, ids: Tensor, keep: int | Tensor) -> None:
    """Raise `InputError` where there is not a label for each of the logits that are asked for."""
    if labels is None:
        return
    rows, columns = ids.shape
    kept = keep.numel() if isinstance(keep, Tensor) else min(keep, columns) or columns
    if labels.shape != (rows, kept):
        raise InputError(f"labels {tuple(labels.shape)} do not match logits {(rows, kept)} [B, T]")


__all__ = ["Generation"]
