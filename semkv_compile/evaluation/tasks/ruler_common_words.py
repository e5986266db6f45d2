"""RULER's common words extraction: which ten words of a numbered list stand in it most often (section 3.3)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.fitting import largest
from semkv.evaluation.tasks.metrics import share_contained
from semkv.evaluation.tasks.sources import Source
from semkv.evaluation.tasks.words import word_list

INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
QUESTION = "\nQuestion: What are the {common} most common words in the above list?"
PREFIX = " Answer: The top {common} words that appear most often in the list are:"
NEW_TOKENS = 120
SHORT = 4096
"""Below this length RULER takes fewer repeats: 6 and 1 instead of 30 and 3, and a smaller example."""


def numbered(items: Sequence[str]) -> str:
    """`1. first 2. second`."""
    return " ".join(f"{number}. {item}" for number, item in enumerate(items, start=1))


@dataclass(frozen=True)
class RulerCommonWords(TextTask):
    """`cwe`: a solved example, then a list whose common words are asked for.

    common: how many words are common. repeats, rare_repeats: how often a common and another word stand in a list of
    4096 tokens or more. words: a text with one word per line; the built-in lists otherwise.
    """

    common: int = 10
    repeats: int = 30
    rare_repeats: int = 3
    words: Source | None = None

    monotone: ClassVar[bool] = True

    @cached_property
    def _words(self) -> tuple[str, ...]:
        found = word_list(10**5) if self.words is None else tuple(dict.fromkeys(self.words.text.split()))
        if len(found) < 40 + self.common:
            raise ConfigError(f"--source words: {len(found)} different words; expected at least {40 + self.common}")
        return found

    def _pool(self, rng: random.Random, count: int) -> list[str]:
        """`count` words in random order; everyday ones where they suffice."""
        plain = word_list(1) if self.words is None else self._words
        pool = plain if count <= len(plain) else self._words
        if count > len(pool):
            raise ConfigError(
                f"task {self.name!r}: {count} different words are needed and there are {len(pool)}; "
                "give --source words=FILE with more of them, or ask for shorter contexts"
            )
        return rng.sample(pool, count)

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        # The same words for any number of them, so that a longer list has what a shorter one has.
        key = f"{self.name}-{length}-{seed}-{index}"
        long = length >= SHORT
        example = self._example(random.Random(f"{key}-example"), long)
        repeats, rare = (self.repeats, self.rare_repeats) if long else (6, 1)

        def render(n: int) -> Prompt:
            pool = self._pool(random.Random(key), n)
            text, common = self._list(pool, repeats, rare, random.Random(f"{key}-order"))
            return Prompt(example + "\n" + INSTRUCTION + text, (self._ask(common),))

        low = self.common + 1
        units = largest(
            lambda n: count(render(n)) <= length, low, max(low, length // (14 if long else 7)), len(self._words)
        )
        if units is None:
            raise self.too_short(length, f"the solved example, a list and {NEW_TOKENS} tokens of answer need more")
        return render(units)

    def _list(self, pool: Sequence[str], repeats: int, rare: int, rng: random.Random) -> tuple[str, list[str]]:
        common, others = list(pool[: self.common]), list(pool[self.common :])
        items = common * repeats + others * rare
        rng.shuffle(items)
        return numbered(items), common

    def _ask(self, common: Sequence[str]) -> Ask:
        prefix = PREFIX.format(common=self.common)
        return Ask(QUESTION.format(common=self.common), tuple(common), NEW_TOKENS, prefix)

    def _example(self, rng: random.Random, long: bool) -> str:
        size, repeats, rare = (40, 10, 3) if long else (20, 3, 1)
        text, common = self._list(self._pool(rng, size), repeats, rare, rng)
        ask = self._ask(common)
        return INSTRUCTION + text + ask.text + ask.prefix + " " + numbered(common)

    def score(self, prediction: str, question: Question) -> float:
        return share_contained(prediction, question.references)
