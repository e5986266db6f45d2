"""Needles at the points of a grid of lengths and depths, and several needles at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Count, Prompt, TextTask
from semkv.evaluation.tasks.haystacks import NOISE, hide
from semkv.evaluation.tasks.metrics import share_contained
from semkv.evaluation.tasks.ruler_needles import (
    NEEDLE,
    NEW_TOKENS,
    TextHaystack,
    draw,
    fill,
    instruction,
    question,
    unused,
)
from semkv.evaluation.tasks.sources import Source

NOISE_WORDS = len(NOISE.split())


@dataclass(frozen=True)
class NeedleGrid(TextTask):
    """`niah` and `niah_multi`: the needle-in-a-haystack test with exact scoring.

    Context i has its needle at depth (i mod depths + 1/2) / depths, so that `depths` samples give one column of the
    picture and more samples repeat it with other needles.

    depths: points from start to end. needles: hidden in one context, the others at even distances after the first,
    around the end; all are asked at once. within: `text` (the haystack, or generated prose) or `noise` (one sentence
    repeated). value_form: numbers, words or uuids. haystack: a text.
    """

    depths: int = 10
    needles: int = 1
    within: Literal["text", "noise"] = "text"
    value_form: Literal["numbers", "words", "uuids"] = "numbers"
    haystack: Source | None = None

    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.depths < 1 or self.needles < 1:
            raise ConfigError(f"task {self.name!r}: depths {self.depths}, needles {self.needles}: expected at least 1")

    @cached_property
    def _text(self) -> TextHaystack:
        return TextHaystack(self.haystack)

    def uses(self, source: str) -> bool:
        return self.within == "text"

    def notes(self) -> tuple[str, ...]:
        if self.within == "noise" or self.haystack is not None:
            return ()
        return (f"{self.name}: the haystack is generated prose; --source haystack=FILE takes a text of yours",)

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        rng = random.Random(f"{self.name}-{length}-{seed}-{index}")
        first = (index % self.depths + 0.5) / self.depths
        depths = [(first + i / self.needles) % 1.0 for i in range(self.needles)]
        taken: set[str] = set()
        keys = [unused(rng, "words", taken) for _ in depths]
        values = [draw(rng, self.value_form) for _ in depths]
        needles = [NEEDLE.format(kind=self.value_form, key=k, value=v) for k, v in zip(keys, values)]
        placed = sorted(zip(depths, needles))
        single = len(values) == 1

        def render(n: int) -> Prompt:
            order = [needle for _, needle in placed]
            at = [depth for depth, _ in placed]
            hidden = self._text.write(n, order, at) if self.within == "text" else hide([NOISE] * n, order, at)
            return Prompt(
                instruction(self.value_form, single) + hidden, (question(self.value_form, keys, values, min(depths)),)
            )

        guess = length * 3 // 4 if self.within == "text" else length // (NOISE_WORDS + 5)
        made = fill(render, count, length, 1, max(guess, 1))
        if made is None:
            raise self.too_short(length, f"the needles, the question and {NEW_TOKENS} tokens of answer need more")
        return made

    def score(self, prediction: str, question: Question) -> float:
        return share_contained(prediction, question.references)
