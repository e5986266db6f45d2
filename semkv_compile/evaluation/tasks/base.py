"""What a task is: it makes samples for any tokenizer, length, index and seed, and scores what a model writes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question, Sample
from semkv.evaluation.tasks.prompts import Ask, Prompt, encode, prompt_tokens
from semkv.evaluation.tasks.sources import Source

Kind = Literal["exact", "generated", "likelihood"]
Count = Callable[[Prompt], int]
"""Tokens of a prompt: context, longest question and the beginning of its answer, special tokens included."""


class Task(ABC):
    """A family of samples, and how a model is measured on them.

    Attributes
    ----------
    kind: how a model is measured. `exact`: greedy tokens against those of the answer, stopping at the first that
    differs. `generated`: greedy text until `new_tokens`, the end of the text or a stop string, then `score`.
    `likelihood`: the text goes on as written, and its tokens' log-likelihoods are taken one by one.
    questions_per_context: the most that may share a context; None where any number may.
    has_question: False where nothing is asked after the context, so that "seen" and "unseen" do not differ.
    """

    name: str
    kind: ClassVar[Kind]
    questions_per_context: ClassVar[int | None] = 1
    has_question: ClassVar[bool] = True

    @property
    def available(self) -> int | None:
        """Questions that the task's data holds; None where it is generated."""
        return None

    def parameters(self) -> dict[str, Any] | None:
        """What besides name, length, index and seed decides a sample, for the cell's key; None where nothing does."""
        return None

    def notes(self) -> tuple[str, ...]:
        """What a reader of results has to know."""
        return ()

    def check_length(self, length: int, max_positions: int | None) -> None:
        """Refuse a length that the model cannot hold; a task's length counts prompt and answer."""
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigError(f"length {length!r}: expected a positive whole number of tokens")
        if max_positions is not None and length > max_positions:
            raise ConfigError(
                f"length {length} for task {self.name!r}: the model's context is {max_positions} tokens; prompt and "
                f"answer together must fit, so ask for at most {max_positions}"
            )

    @abstractmethod
    def make(self, tokenizer: Any, length: int, index: int, *, seed: int, questions: int) -> Sample:
        """Sample `index` of at most `length` tokens. Raises ConfigError where length or tokenizer cannot express it."""


class WrittenTask(Task):
    """A task whose answers are written freely and scored.

    Attributes
    ----------
    monotone: a score of 1 cannot be lost by writing on, so generation stops there.
    stop: strings that end an answer; what follows is cut.
    """

    kind: ClassVar[Kind] = "generated"
    monotone: ClassVar[bool] = False
    stop: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def score(self, prediction: str, question: Question) -> float:
        """How right a text is, in [0, 1], against `question.references`."""


@dataclass(frozen=True)
class OptionTask(Task):
    """A task with options. Subclasses are dataclasses: fields are options, or sources where typed `Source`.

    name: what it is called in grids and tables. chat: write the prompt by the tokenizer's chat template, where it has one.
    """

    name: str
    chat: bool = False

    tolerated: ClassVar[float] = 0.0
    """Share of a context's tokens that may be unknown to the tokenizer."""
    version: ClassVar[int] = 1
    """Raised where samples change, so that old rows are not taken for new ones."""

    def uses(self, source: str) -> bool:
        """Whether the source that the field `source` holds decides anything under these options."""
        return True

    def parameters(self) -> dict[str, Any]:
        found: dict[str, Any] = {"version": self.version}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Source):
                value = value.digest if self.uses(field.name) else None
            if field.name != "name":
                found[field.name] = value
        return found

    def too_short(self, length: int, needed: str) -> ConfigError:
        """The error for a length that cannot hold a sample."""
        return ConfigError(f"length {length} for task {self.name!r}: too short, {needed}; ask for longer contexts")

    def need(self, source: Source | None, key: str, what: str) -> Source:
        """A source that the user has to give. Raises ConfigError where it is missing."""
        if source is None:
            raise ConfigError(f"task {self.name!r} needs {what}: give --source {key}=FILE or a Hub name")
        return source


class TextTask(OptionTask, WrittenTask):
    """A task whose samples are prompts in words, with questions behind them."""

    cut: ClassVar[bool] = False
    """Whether a prompt that is too long loses its middle, as LongBench's do."""

    @property
    def chats(self) -> bool:
        """Whether the benchmark uses chat templates for this task at all."""
        return True

    @abstractmethod
    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        """The text of sample `index`: at most `length` tokens by `count`, the answers' `new_tokens` included."""

    def make(self, tokenizer: Any, length: int, index: int, *, seed: int, questions: int) -> Sample:
        chat = self.chat and self.chats
        prompt = self.prompt(length, index, seed, questions, lambda p: prompt_tokens(tokenizer, p, chat=chat))
        encoded = encode(
            tokenizer,
            prompt,
            task=self.name,
            chat=chat,
            tolerated=self.tolerated,
            length=length if self.cut else None,
        )
        asked = tuple(
            Question(
                text=ask.text + ask.prefix,
                ids=ids,
                answer_text=" | ".join(ask.references),
                answer=(),
                depth=ask.depth,
                references=ask.references,
                choices=ask.choices,
                new_tokens=ask.new_tokens,
            )
            for ask, ids in zip(prompt.asks, encoded.questions)
        )
        return Sample(self.name, length, index, encoded.context, asked)


__all__ = ["Ask", "Count", "Kind", "OptionTask", "Prompt", "Task", "TextTask", "WrittenTask"]
