"""What `generate` and `forward` are asked for: looked at before any work, and refused by name where a memory cannot give it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin

from semkv.errors import ConfigError, InputError
from semkv.runtime.state import State

BROUGHT = frozenset({"inputs_embeds", "position_ids", "layer_inputs", "both_ways"})
"""What a compiled model itself reads besides ids and mask."""

TAKES_BACK = "a compressed memory cannot take tokens back; use greedy, sampling or beam search"

REFUSED = {
    "assistant_model": TAKES_BACK,
    "prompt_lookup_num_tokens": TAKES_BACK,
    "penalty_alpha": TAKES_BACK,
    "assistant_early_exit": TAKES_BACK,
    "is_assistant": "as an assistant it would have to take back the tokens that are not accepted, which a compressed memory cannot",
    "prefill_chunk_size": "prompts are read in chunks anyway; CompileConfig(prefill_chunk=...) sets their size",
    "cache_implementation": "a compiled model has its own memory; semkv.compile's method, budget and config say what it holds and where",
    "cache_config": "a compiled model has its own memory; semkv.compile's method, budget and config say what it holds and where",
    "output_attentions": "attention runs in one operator that keeps no weights; ask the model that was compiled",
    "output_hidden_states": "a program returns logits alone; ask the model that was compiled",
    "compile_config": "a program is compiled already; CompileConfig(kernels=..., cuda_graphs=...) says how it runs",
}
"""Arguments that ask for something else than a compiled model has, and what to do."""

INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "trust_remote_code", "tokenizer"})

SAME = 16
"""Tokens that begin like the conversation by chance, as a template's opening does, at most."""


CHECKPOINTS = ("cache_implementation", "cache_config", "compile_config", "output_attentions", "output_hidden_states")
"""Of those, what a checkpoint's own configuration may ask for, for the cache and the outputs of the model that it belongs to."""


def own_configuration(config: GenerationConfig | None) -> GenerationConfig:
    """A copy of a model's configuration for its compiled form, without what nobody but the checkpoint asked for."""
    made = GenerationConfig() if config is None else copy.deepcopy(config)
    for name in CHECKPOINTS:
        if getattr(made, name, None):
            setattr(made, name, None)
    if made.use_cache is False:  # as MPT's: of the model that it belongs to as well
        made.use_cache = GenerationConfig().use_cache
    return made


def check_arguments(
    call: str, kwargs: dict[str, Any], own: GenerationConfig | None, state: State | None
) -> Callable[[str], Any]:
    """Refuse, by name, what cannot be done; a function that tells what was asked for under a name, by argument or configuration.

    Raises
    ------
    ConfigError: see `REFUSED`; an argument that nobody has; one that does not go with a state.
    """
    configs = [config for config in (kwargs.get("generation_config"), own) if config is not None]

    def asked(name: str) -> Any:
        given = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in given if value is not None), None)

    for name, reason in REFUSED.items():
        value = asked(name)
        if isinstance(value, Tensor) or value:
            raise ConfigError(f"{call}({name}=...): {reason}")
    if asked("use_cache") is False:
        raise ConfigError(f"{call}(use_cache=False): a compiled model always runs on its state")
    if call == "generate":
        known = INPUTS | set(GenerationConfig().to_dict()) | set(inspect.signature(GenerationMixin.generate).parameters)
        known |= BROUGHT
        unknown = [name for name, value in kwargs.items() if value is not None and name not in known]
        if unknown:
            raise ConfigError(
                f"generate({unknown[0]}=...): neither an argument of generate nor an input of this model, which reads input_ids or "
                "inputs_embeds, and attention_mask"
            )
    for name in ("num_beams", "num_return_sequences"):
        if state is not None and (asked(name) or 1) > 1:
            raise ConfigError(
                f"{call}(state=..., {name}={asked(name)}): a state goes on one way; make copies with state.select([0, 0, ...])"
            )
    return asked


def given_state(call: str, state: Any, *others: Any) -> State | None:
    """The state among the arguments that may hold one; `ConfigError` for two, or for a cache that is none."""
    given = [x for x in (state, *others) if x is not None]
    if len(given) > 1 and any(x is not given[0] for x in given):
        raise ConfigError(f"{call}: a state was given under two names; pass one of state, cache and past_key_values")
    if given and not isinstance(given[0], State):
        raise ConfigError(
            f"{call}: the memory of a compiled model is a State, made by prefill, and a {type(given[0]).__name__} was given; pass "
            "state=..., or leave it out and the prompt is read"
        )
    return given[0] if given else None


def new_tokens(rows: list[Tensor], state: State) -> list[Tensor]:
    """What each row has to read of the ids int64 [n] that were given with `state`: the pending token and the new ones.

    Ids that begin with the whole text of a row are everything again; ids that begin otherwise are new tokens.

    Raises
    ------
    InputError: ids that begin as the text does, go on for more than `SAME` tokens and then differ from it, or end before it does: neither
        the one nor the other. Or rows of both kinds.
    """
    read, text = state.lengths, [ids.to(rows[0].device) for ids in state.ids]
    same = [_common(row, whole) for row, whole in zip(rows, text)]
    again = [count == len(whole) for count, whole in zip(same, text)]
    if all(again):
        return [row[before:] for row, before in zip(rows, read)]
    for index, (count, whole, row) in enumerate(zip(same, text, rows)):
        if not again[index] and (any(again) or count > SAME):
            ends = "end there" if count == len(row) else "then differ"
            raise InputError(
                f"row {index}: the ids share their first {count} tokens with the {len(whole)} that the state has read or made, and {ends}: "
                "pass everything again, beginning with all of those, or the new tokens alone (compiled.extend adds tokens whatever they "
                "begin with); a conversation that was changed has to be read anew"
            )
    return state.with_pending(rows)[0]


def check_turn(rows: list[Tensor], state: State) -> None:
    """Raise `InputError` where the ids int64 [n] of a turn with images are everything again: images that were read may have changed."""
    for index, (row, text) in enumerate(zip(rows, state.ids)):
        if _common(row, text.to(row.device)) == len(text):
            raise InputError(
                f"row {index}: with a state and images, the ids begin with all {len(text)} tokens that the state has read; nobody can "
                "tell whether its images are the same ones: pass the new turn alone, with its own images, or leave the state out"
            )


def _common(row: Tensor, other: Tensor) -> int:
    """Tokens with which both begin."""
    count = min(len(row), len(other))
    differ = (row[:count] != other[:count]).nonzero()
    return int(differ[0]) if len(differ) else count


def room_for(lengths: list[int], columns: int, asked: Callable[[str], Any], limit: int | None) -> dict[str, Any]:
    """Refuse what would leave the model's context half-way: rows of `lengths` tokens when all is read, ids of `columns` columns, and as
    many new tokens as were asked for; the last one is never read.

    Returns arguments to add: where no length was asked for, Hugging Face's 20 tokens, or as many as fit.
    """
    new, longest = asked("max_new_tokens"), asked("max_length")
    least = 1
    if new is None and longest is None:
        new = DEFAULT_NEW if limit is None else max(1, min(DEFAULT_NEW, limit + 1 - max(lengths)))
        added = {"max_new_tokens": new} if new < DEFAULT_NEW else {}
    else:
        new, added = (longest - columns if new is None else new), {}
    new = max(least, new)
    if limit is not None and max(lengths) + new > limit + 1:
        raise InputError(f"{max(lengths)} tokens and {new} new ones do not fit the model's context of {limit}")
    return added


DEFAULT_NEW = 20
"""New tokens that Hugging Face's `generate` makes where nobody says how many."""

__all__ = ["BROUGHT", "check_arguments", "check_turn", "given_state", "new_tokens", "own_configuration", "room_for"]
