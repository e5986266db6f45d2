"""RULER's frequent words extraction: the three most frequent of coded words drawn by Zipf's law (section 3.3)."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.fitting import largest
from semkv.evaluation.tasks.metrics import share_contained

INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
NEW_TOKENS = 50
DOTS = "..."
"""What stands for the most frequent rank, which is noise."""
ASKED = 3


def zeta(alpha: float, terms: int = 1000) -> float:
    """Riemann's zeta function for alpha > 1: a partial sum and the Euler-Maclaurin remainder."""
    head = sum(k**-alpha for k in range(1, terms))
    return head + terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2 + alpha * terms ** (-alpha - 1) / 12


def rank_counts(words: int, ranks: int, alpha: float) -> list[int]:
    """How often each rank stands among about `words` words: its share by Zipf's law, rounded down."""
    whole = zeta(alpha)
    return [int(words * rank**-alpha / whole) for rank in range(1, ranks + 1)]


@dataclass(frozen=True)
class RulerFrequentWords(TextTask):
    """`fwe`: coded words whose counts fall as rank to the power -alpha; the first rank is dots.

    alpha: exponent of the law, above 1. letters: of a coded word. share: ranks per token of the length.
    """

    alpha: float = 2.0
    letters: int = 6
    share: float = 1 / 50

    monotone: ClassVar[bool] = True

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        rng = random.Random(f"{self.name}-{length}-{seed}-{index}")
        ranks = max(int(length * self.share), ASKED + 2)
        coded: list[str] = []
        while len(coded) < ranks - 1:
            word = "".join(rng.choices(string.ascii_lowercase, k=self.letters))
            if word not in coded:
                coded.append(word)
        ranked = [DOTS, *coded]
        order = rng.random()

        def render(n: int) -> Prompt:
            counts = rank_counts(n, ranks, self.alpha)
            items = [word for word, times in zip(ranked, counts) for _ in range(times)]
            random.Random(order).shuffle(items)
            ask = Ask(QUESTION, tuple(ranked[1 : 1 + ASKED]), NEW_TOKENS, PREFIX)
            return Prompt(INSTRUCTION + " ".join(items), (ask,))

        # Fewer words than this and the third rank asked for is no more frequent than the next.
        low = 4 * (ASKED + 2) ** 2
        units = largest(lambda n: count(render(n)) <= length, low, max(low, length // 3))
        if units is None:
            raise self.too_short(length, f"{low} coded words, the question and {NEW_TOKENS} tokens of answer need more")
        return render(units)

    def score(self, prediction: str, question: Question) -> float:
        return share_contained(prediction, question.references)
