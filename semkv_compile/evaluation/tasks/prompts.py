"""Prompts as token ids: a context that is read first, and questions that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv.errors import ConfigError
from semkv.evaluation.samples import context_ids

PLACE = "\u2402content\u2402"
"""Stands for the prompt while a chat template is rendered; no text holds it."""

SHOWN = 5


@dataclass(frozen=True)
class Ask:
    """A question of a prompt.

    text: follows the context as it is. prefix: the beginning of the answer, given to the model after the chat
    template's turn. references: right answers. new_tokens: how many tokens an answer may have. depth: place of the
    evidence, 0 = start of the context, 1 = end; None where it has none. choices: all answers there are, for
    classification.
    """

    text: str
    references: tuple[str, ...]
    new_tokens: int
    prefix: str = ""
    depth: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A context and the questions that are asked of it, each on its own."""

    context: str
    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Encoded:
    """Ids of a context and of what follows it, a tuple per question; together they are the ids of the whole text."""

    context: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What the tokenizer's chat template puts before and after a user's message. Raises ConfigError without one."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--chat: this model's tokenizer has no chat template; leave --chat out for a base model")
    message = [{"role": "user", "content": PLACE}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, found, after = text.partition(PLACE)
    if not found:
        raise ConfigError("--chat: the tokenizer's chat template leaves the user's message out; leave --chat out")
    return before, after


def _ids(tokenizer: Any, text: str, chat: bool) -> tuple[int, ...]:
    """A text that starts a sequence; a chat template writes the leading special tokens itself."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if chat else context_ids(tokenizer, text)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    for place, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return place
    return min(len(first), len(second))


def _texts(tokenizer: Any, prompt: Prompt, chat: bool) -> tuple[str, list[str]]:
    """The context, and the whole prompt with each question."""
    before, after = chat_frame(tokenizer) if chat else ("", "")
    context = before + prompt.context
    return context, [context + ask.text + after + ask.prefix for ask in prompt.asks]


def prompt_tokens(tokenizer: Any, prompt: Prompt, *, chat: bool = False) -> int:
    """Tokens of the longest prompt with what its answer may have."""
    _, wholes = _texts(tokenizer, prompt, chat)
    return max(len(_ids(tokenizer, whole, chat)) + ask.new_tokens for whole, ask in zip(wholes, prompt.asks))


def encode(
    tokenizer: Any,
    prompt: Prompt,
    *,
    task: str,
    chat: bool = False,
    tolerated: float = 0.0,
    length: int | None = None,
) -> Encoded:
    """Ids of a prompt, divided where its questions begin.

    The whole text is tokenised at once and divided after the last token that belongs to the context alone, so that
    context and question together are what a model sees of the text in one piece.

    Parameters
    ----------
    tolerated: share of tokens that may be unknown to the tokenizer; questions and answers may have none.
    length: where a prompt with its answer is longer, its middle is left out (LongBench, section 3.2).

    Raises ConfigError where the tokenizer lacks words of the text, or a question leaves no room for its context.
    """
    context, wholes = _texts(tokenizer, prompt, chat)
    alone = _ids(tokenizer, context, chat)
    full = [_ids(tokenizer, whole, chat) for whole in wholes]
    _check_known(tokenizer, prompt, full, task, tolerated)
    start = min(_shared(alone, ids) for ids in full)
    if length is None:
        return Encoded(full[0][:start], tuple(ids[start:] for ids in full))
    kept = [_without_middle(ids, start, length - ask.new_tokens, task) for ids, ask in zip(full, prompt.asks)]
    if len({ids for ids, _ in kept}) > 1:
        raise ConfigError(f"task {task!r}: questions of different lengths cut one context differently; ask one each")
    return Encoded(kept[0][0], tuple(ids for _, ids in kept))


def _without_middle(ids: tuple[int, ...], start: int, limit: int, task: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Context and question, `limit` ids in all: the first half and the last half of the whole."""
    if len(ids) <= limit:
        return ids[:start], ids[start:]
    front = limit // 2
    back = len(ids) - (limit - front)
    if front < 1 or back > start:
        raise ConfigError(
            f"task {task!r}: a question of {len(ids) - start} tokens leaves no room for its context in {limit} tokens; "
            "ask for longer contexts"
        )
    return ids[:front] + ids[back:start], ids[start:]


def _check_known(tokenizer: Any, prompt: Prompt, full: Sequence[tuple[int, ...]], task: str, tolerated: float) -> None:
    """Refuse a prompt that the tokenizer cannot write down."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return
    asked = " ".join(text for ask in prompt.asks for text in (ask.text, ask.prefix, *ask.references))
    missing = _unknown_words(tokenizer, asked, unknown)
    share = max(ids.count(unknown) / len(ids) for ids in full)
    if share > tolerated:
        missing += [word for word in _unknown_words(tokenizer, prompt.context, unknown) if word not in missing]
    if missing:
        shown = ", ".join(repr(word) for word in missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
        raise ConfigError(
            f"task {task!r}: this tokenizer has no token for {shown}; take a model whose tokenizer writes any text, or "
            "the tasks single, multi, confusable, dense and perplexity, which the bundled model can express"
        )


def _unknown_words(tokenizer: Any, text: str, unknown: int) -> list[str]:
    found = []
    for word in dict.fromkeys(text.split()):
        if unknown in tokenizer(word, add_special_tokens=False)["input_ids"]:
            found.append(word)
            if len(found) > SHOWN:
                break
    return found
