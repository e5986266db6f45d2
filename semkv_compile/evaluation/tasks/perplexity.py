"""Perplexity over long text: the tokens that follow a compressed context, one at a time, as written."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question, Sample, context_ids
from semkv.evaluation.tasks.base import Kind, OptionTask
from semkv.evaluation.tasks.sources import Source


@dataclass(frozen=True)
class Perplexity(OptionTask):
    """`perplexity`: the text is read to all but its last tokens and compressed; then each of these is predicted.

    A sample of length n is a passage of n tokens that begins where a line or sentence does.

    tokens: how many are predicted, of at most half the length. text: the text to read, of a folder its files in turn; prose of the
    bundled grammar otherwise.
    """

    tokens: int = 256
    text: Source | None = None

    kind: ClassVar[Kind] = "likelihood"
    has_question: ClassVar[bool] = False
    tolerated: ClassVar[float] = 0.01

    def notes(self) -> tuple[str, ...]:
        if self.text is not None:
            return ()
        return (f"{self.name}: the text is prose of the bundled grammar; --source text=FILE takes a text of yours",)

    def check_length(self, length: int, max_positions: int | None) -> None:
        super().check_length(length, max_positions)
        if not 1 <= self.tokens <= length // 2:
            raise ConfigError(
                f"task {self.name!r}: {self.tokens} tokens of {length} to predict; expected 1 to half of the length: "
                f"--set {self.name}.tokens={max(length // 4, 1)}, or longer contexts"
            )

    @cached_property
    def _texts(self) -> tuple[str, ...] | None:
        return None if self.text is None else self.text.texts

    def make(self, tokenizer: Any, length: int, index: int, *, seed: int, questions: int) -> Sample:
        ids = self._passage(tokenizer, length, index, seed)
        context, rest = ids[: -self.tokens], ids[-self.tokens :]
        question = Question(text="", ids=(), answer_text="", answer=rest, depth=None)
        return Sample(self.name, length, index, context, (question,))

    def _passage(self, tokenizer: Any, length: int, index: int, seed: int) -> tuple[int, ...]:
        """`length` ids of the text from a place that index and seed decide."""
        rng = random.Random(f"{self.name}-{seed}-{index}")
        if self._texts is None:
            from semkv.profiles.bundled.tasks import make_text

            ids = context_ids(tokenizer, make_text(2 * length, rng.randrange(2**31)))[:length]
        else:
            ids = self._cut(tokenizer, self._texts[index % len(self._texts)], length, rng)
        if len(ids) < length:
            raise ConfigError(
                f"task {self.name!r}: the text has fewer than {length} tokens; give a longer one with --source text=FILE, "
                "or ask for shorter contexts"
            )
        unknown = tokenizer.unk_token_id
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        if unknown is not None and unknown not in special and ids.count(unknown) > self.tolerated * len(ids):
            raise ConfigError(
                f"task {self.name!r}: this tokenizer has no token for {100 * ids.count(unknown) / len(ids):.0f} % of the "
                "text; take a model whose tokenizer writes any text, or leave --source text out"
            )
        return ids

    def _cut(self, tokenizer: Any, text: str, length: int, rng: random.Random) -> tuple[int, ...]:
        """Ids from a random line or sentence on; the whole text where it is only as long as that."""
        per_token = max(len(text[:20000]) / max(len(context_ids(tokenizer, text[:20000])), 1), 1.0)
        room = max(len(text) - int(1.3 * per_token * length), 0)
        start = rng.randint(0, room)
        if start:
            breaks = [place for mark in ("\n", ". ") if 0 <= (place := text.find(mark, start)) <= room]
            start = min(breaks) + 1 if breaks else 0
        passage = text[start:].lstrip()
        ids = context_ids(tokenizer, passage[: int(2 * per_token * length)])
        return (ids if len(ids) >= length else context_ids(tokenizer, passage))[:length]
