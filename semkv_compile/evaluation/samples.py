"""Contexts and questions as token ids, for any tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv.errors import ConfigError

GOLDEN = (math.sqrt(5) - 1) / 2
SEED_BASE = 1_000_000_007  # far from the seeds that training and calibration count from 0
LAST_WORDS = 16  # words of the preceding text that a continuation is tokenised with


@dataclass(frozen=True)
class Question:
    """A question to append to a context.

    ids, answer: token ids; without an answer the model writes up to `new_tokens` and its text is scored against
    `references`. depth: place of the evidence, 0 = start, 1 = end; None where it has none. choices: all answers there
    are, for classification.
    """

    text: str
    ids: tuple[int, ...]
    answer_text: str
    answer: tuple[int, ...]
    depth: float | None
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    new_tokens: int = 0


@dataclass(frozen=True)
class Sample:
    """One context and its questions; `index` numbers the contexts of one family and length."""

    family: str
    length: int
    index: int
    ids: tuple[int, ...]
    questions: tuple[Question, ...]

    @property
    def longest(self) -> int:
        """Tokens of the context with its longest question and answer."""
        return len(self.ids) + max(len(q.ids) + len(q.answer) + q.new_tokens for q in self.questions)


def families() -> tuple[str, ...]:
    """Names of the task families."""
    from semkv.profiles.bundled.tasks import FAMILIES

    return FAMILIES


def context_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a text that starts a sequence: with the tokenizer's leading special tokens, without a closing one."""
    ids = list(tokenizer(text)["input_ids"])
    if ids and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return tuple(ids)


def continuation_ids(tokenizer: Any, before: str, after: str) -> tuple[int, ...]:
    """Ids of `after` as they follow `before`; `after` starts with a space.

    Tokenised together with the end of `before`, because some tokenizers treat the start of a text differently; where
    the two do not separate at a token boundary, `after` is tokenised alone.
    """
    tail = " ".join(before.split()[-LAST_WORDS:])
    head = tokenizer(tail, add_special_tokens=False)["input_ids"]
    both = tokenizer(tail + after, add_special_tokens=False)["input_ids"]
    if both[: len(head)] == head and len(both) > len(head):
        return tuple(both[len(head) :])
    return tuple(tokenizer(after, add_special_tokens=False)["input_ids"])


def spread_depth(index: int) -> float:
    """Depth in [0, 1) of the first question of context `index`: evenly spread however many contexts are drawn."""
    return ((index + 0.5) * GOLDEN) % 1.0


def make_sample(tokenizer: Any, family: str, length: int, index: int, *, seed: int, questions: int) -> Sample:
    """Context `index` of a family with about `length` tokens and `questions` questions, deterministic in its arguments.

    Raises ConfigError where so few tokens cannot hold the evidence, or the tokenizer lacks a word of an answer.
    """
    from semkv.profiles.bundled.tasks import make_haystack

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    try:
        haystack = make_haystack(
            family,
            length,
            SEED_BASE * (seed + 1) + index,
            count_tokens=count,
            n_questions=questions,
            depth=spread_depth(index),
        )
    except ValueError as error:
        raise ConfigError(f"length {length} for family {family!r}: {error}") from error
    asked = []
    for question in haystack.questions:
        ids = continuation_ids(tokenizer, haystack.context, question.text)
        answer = continuation_ids(tokenizer, question.text, " " + question.answer)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in answer:
            raise ConfigError(f"answer {question.answer!r}: the tokenizer has no token for a word of it")
        asked.append(Question(question.text, ids, question.answer, answer, question.depth))
    return Sample(family, length, index, context_ids(tokenizer, haystack.context), tuple(asked))


def check_lengths(lengths: Sequence[int], max_positions: int | None, reserve: int = 64) -> None:
    """Refuse lengths that the model cannot hold together with a question and an answer (`reserve` tokens)."""
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(f"length {length!r}: expected a positive whole number of tokens")
        if max_positions is not None and length + reserve > max_positions:
            raise ConfigError(
                f"length {length}: the model's context is {max_positions} tokens and a question with its answer needs "
                f"up to {reserve} of them; ask for at most {max_positions - reserve}"
            )
