"""RULER's needles in a haystack: single, among other keys, with several values, and several asked at once.

Structure, wording and scoring are those of RULER (Hsieh et al. 2024, COLM, section 3.1 and appendix B).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from semkv.evaluation.samples import Question
from semkv.evaluation.tasks import words
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.fitting import largest
from semkv.evaluation.tasks.haystacks import NOISE, hide, prose, repeated, sentences_of, words_of
from semkv.evaluation.tasks.metrics import share_contained
from semkv.evaluation.tasks.sources import Source

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = tuple(round(100 * i / 39) / 100 for i in range(40))
"""RULER puts needles into prose at forty even depths."""

NEW_TOKENS = 128

Form = Literal["words", "numbers", "uuids"]


def draw(rng: random.Random, form: Form) -> str:
    """A key or value: adjective-noun, a number of seven digits, or a version 4 UUID."""
    if form == "words":
        return words.key(rng)
    if form == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def unused(rng: random.Random, form: Form, taken: set[str]) -> str:
    """A key that is not in `taken`, where it then is."""
    key = draw(rng, form)
    while key in taken:
        key = draw(rng, form)
    taken.add(key)
    return key


def listed(items: Sequence[str]) -> str:
    """`a`, or `a, b, and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def instruction(kind: str, single: bool) -> str:
    """The sentence before the haystack; `kind` is `numbers` or `uuids`."""
    if single:
        one = kind.removesuffix("s")
        return (
            f"A special magic {one} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {one} afterwards.\n"
        )
    return (
        f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )


def question(
    kind: str, keys: Sequence[str], values: Sequence[str], depth: float | None, new_tokens: int = NEW_TOKENS
) -> Ask:
    """What is asked of the haystack: one value, or all of them; new_tokens: what an answer may have."""
    if len(values) == 1:
        one = kind.removesuffix("s")
        text = f"\nWhat is the special magic {one} for {keys[0]} mentioned in the provided text?"
        prefix = f" The special magic {one} for {keys[0]} mentioned in the provided text is"
    else:
        names = listed(keys)
        text = f"\nWhat are all the special magic {kind} for {names} mentioned in the provided text?"
        prefix = f" The special magic {kind} for {names} mentioned in the provided text are"
    return Ask(text, tuple(values), new_tokens, prefix, depth)


class TextHaystack:
    """Prose to hide needles in: a user's text, repeated where it is short, or generated sentences."""

    def __init__(self, source: Source | None):
        self.words = words_of(source.text if source is not None else prose(0))

    def write(self, count: int, needles: Sequence[str], depths: Sequence[float]) -> str:
        """The first `count` words with the needles at `depths`, which ascend."""
        return hide(sentences_of(" ".join(repeated(self.words, count))), needles, depths)


def fill(render: Callable[[int], Prompt], count: Count, length: int, low: int, guess: int) -> Prompt | None:
    """The prompt of the most units of haystack that `length` tokens hold; None where `low` are too many."""
    units = largest(lambda n: count(render(n)) <= length, low, guess)
    return None if units is None else render(units)


@dataclass(frozen=True)
class RulerNeedles(TextTask):
    """One of RULER's eight needle tasks.

    within: what hides the needles: `noise` (one sentence repeated), `text` (the haystack, or generated prose) or
    `needles` (others like them). keys, values: needles' keys, and values of each. asked: keys that are asked for.
    key_form, value_form: words, numbers or uuids. new_tokens: that an answer may have, RULER's 128. haystack: a text.
    """

    within: Literal["noise", "text", "needles"] = "text"
    keys: int = 1
    values: int = 1
    asked: int = 1
    key_form: Form = "words"
    value_form: Form = "numbers"
    new_tokens: int = NEW_TOKENS
    haystack: Source | None = None

    monotone: ClassVar[bool] = True

    @cached_property
    def _text(self) -> TextHaystack:
        return TextHaystack(self.haystack)

    def uses(self, source: str) -> bool:
        return self.within == "text"

    def notes(self) -> tuple[str, ...]:
        if self.within != "text" or self.haystack is not None:
            return ()
        return (f"{self.name}: the haystack is generated prose; --source haystack=FILE takes a text of yours",)

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        rng = random.Random(f"{self.name}-{length}-{seed}-{index}")
        taken: set[str] = set()
        keys = [unused(rng, self.key_form, taken) for _ in range(max(self.keys, self.asked))]
        values = [[draw(rng, self.value_form) for _ in range(self.values)] for _ in keys]
        needles = [self._needle(key, value) for key, of_key in zip(keys, values) for value in of_key]
        rng.shuffle(needles)
        chosen = rng.sample(range(len(keys)), self.asked)
        answers = [value for i in chosen for value in values[i]]
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        places = sorted((rng.random() for _ in needles), reverse=True)
        distractors: list[str] = []
        others = random.Random(rng.random())

        def sentences(n: int) -> list[str]:
            if self.within == "noise":
                return [NOISE] * n
            while len(distractors) < n:
                # Another needle of an asked key would make its answer ambiguous.
                key = draw(others, self.key_form)
                if key not in taken:
                    distractors.append(self._needle(key, draw(others, self.value_form)))
            return distractors[:n]

        def render(n: int) -> Prompt:
            if self.within == "text":
                hidden = self._text.write(n, needles, depths)
            else:
                lines = sentences(n)
                for place, needle in zip(places, needles):
                    lines.insert(int(place * n), needle)
                hidden = "\n".join(lines)
            context = instruction(self.value_form, len(answers) == 1) + hidden
            depth = min(context.index(answer) for answer in answers) / len(context)
            return Prompt(
                context, (question(self.value_form, [keys[i] for i in chosen], answers, depth, self.new_tokens),)
            )

        low = max(len(needles), 1)
        guess = length if self.within == "text" else length // 25
        made = fill(render, count, length, low, max(guess * 3 // 4, low))
        if made is None:
            raise self.too_short(length, f"the needles, the question and {self.new_tokens} tokens of answer need more")
        return made

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_form, key=key, value=value)

    def score(self, prediction: str, question: Question) -> float:
        return share_contained(prediction, question.references)
