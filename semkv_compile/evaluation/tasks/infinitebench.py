"""InfiniteBench's retrieval tasks at any length: a pass key, a string of repeated digits, a value in a JSON object.

Texts, prompts and scoring are those of Zhang et al. 2024 (ACL, section 3.2), which follow Mohtashami and Jaggi 2023
and Liu et al. 2024; prompts are the ones for models that continue text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Literal

from semkv.evaluation.samples import Question, spread_depth
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.haystacks import NOISE
from semkv.evaluation.tasks.metrics import first_number
from semkv.evaluation.tasks.ruler_needles import draw, fill

HIDDEN = "There is an important info hidden inside a lot of irrelevant text. "
QUIZ = "I will quiz you about the important information there.\n\n"
PASSKEY = HIDDEN + "Find it and memorize them. " + QUIZ
NUMBER = HIDDEN + "Find it. " + QUIZ
OBJECT = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
SEPARATORS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))

PASSKEY_TOKENS, NUMBER_TOKENS, VALUE_TOKENS = 6, 12, 50


def repeated_digits(rng: random.Random, count: int = 5) -> str:
    """Twice `count` digits, half of them repeats of the one they stand beside, which models tend to drop."""
    digits = [str(rng.randint(0, 9)) for _ in range(count)]
    for _ in range(count):
        place = rng.randrange(len(digits))
        digits.insert(place, digits[place])
    return "".join(digits)


@dataclass(frozen=True)
class HiddenNumber(TextTask):
    """`infinitebench_passkey` and `infinitebench_number_string`: a number in a sentence that is repeated around it."""

    what: Literal["passkey", "number_string"] = "passkey"

    monotone: ClassVar[bool] = False

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        rng = random.Random(f"{self.name}-{length}-{seed}-{index}")
        if self.what == "passkey":
            number = "".join(str(rng.randint(0, 9)) for _ in range(5))
            noun, before, new_tokens = "pass key", PASSKEY, PASSKEY_TOKENS
        else:
            number = repeated_digits(rng)
            noun, before, new_tokens = "sequence of digits", NUMBER, NUMBER_TOKENS
        needle = f"The {noun} is {number}. Remember it. {number} is the {noun}."
        depth = spread_depth(index)

        def render(n: int) -> Prompt:
            lines = [NOISE] * n
            lines.insert(round(depth * n), needle)
            context = before + "\n".join(lines)
            ask = Ask(
                f"\n\nWhat is the {noun}?",
                (number,),
                new_tokens,
                f"\n\nThe {noun} is",
                context.index(number) / len(context),
            )
            return Prompt(context, (ask,))

        made = fill(render, count, length, 1, max(length // 26, 1))
        if made is None:
            raise self.too_short(length, "the number, the question and its answer need more")
        return made

    def score(self, prediction: str, question: Question) -> float:
        return float(first_number(prediction) == question.references[0])


@dataclass(frozen=True)
class KeyValues(TextTask):
    """`infinitebench_kv_retrieval`: a JSON object of random UUIDs, and a key whose value is asked for.

    Questions about one object may share it.
    """

    questions_per_context: ClassVar[int | None] = None

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        rng = random.Random(f"{self.name}-{length}-{seed}-{index}")
        depths = [spread_depth(index), *[rng.random() for _ in range(questions - 1)]]
        pairs: list[tuple[str, str]] = []

        def render(n: int) -> Prompt:
            while len(pairs) < n:
                pairs.append((draw(rng, "uuids"), draw(rng, "uuids")))
            taken = pairs[:n]
            context = OBJECT + "{" + ", ".join(f'"{key}": "{value}"' for key, value in taken) + "}"
            asks = []
            for depth in depths:
                key, value = taken[int(depth * n)]
                text = f'\n\nKey: "{key}"\nThe value associated with the specified key is: '
                asks.append(Ask(text, (value,), VALUE_TOKENS, depth=context.index(value) / len(context)))
            return Prompt(context, tuple(asks))

        made = fill(render, count, length, 2, max(length // 60, 2))
        if made is None:
            raise self.too_short(length, "two pairs, the question and its answer need more")
        return made

    def score(self, prediction: str, question: Question) -> float:
        return float(question.references[0] in prediction.translate(SEPARATORS).split())
