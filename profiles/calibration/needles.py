"""Needle tests: contexts with a known answer span and questions for it (CompressKV Sec. 4.1, 3 kinds of needles)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .measure_settings import MeasureSettings

ADJECTIVES = ("amber", "silent", "northern", "crooked", "velvet", "hollow", "copper", "early")
NOUNS = ("lighthouse", "orchard", "library", "harbour", "workshop", "garden", "bridge", "station")
DISHES = ("roasted pumpkin soup", "lemon and rosemary bread", "pickled herring salad", "walnut and honey cake")
PLACES = ("under the third marble step", "behind the old clock tower", "inside a blue tin box", "below the broken well")

KINDS = (
    ("The pass code of the {key} is {value}.", "What is the pass code of the {key}? The pass code of the {key} is"),
    ("The dish of the {key} is {value}.", "What is the dish of the {key}? The dish of the {key} is"),
    ("The spare key of the {key} lies {value}.", "Where lies the spare key of the {key}? It lies"),
)
"""Sentence and question of each kind: a number, a thing and a place, as the paper has three needles."""

SEARCH = 64
"""Tokens around a depth in which the end of a sentence is looked for."""


@dataclass(frozen=True)
class NeedleQuestion:
    """A question to be appended to a context. ids, answer: tokens; evidence: places of the answer span in the context."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class NeedleTest:
    """A context int64 [n] and its questions, each a test of its own."""

    context: Tensor
    questions: tuple[NeedleQuestion, ...]


def bundled_needles(tokenizer: Any, settings: MeasureSettings, seed: int) -> tuple[NeedleTest, ...]:
    """Haystacks of every family over lengths and depths; the answer span is the evidence of the question."""
    from semkv.profiles.bundled.tasks import FAMILIES, make_haystack

    tests = []
    for length in lengths(settings):
        for turn, depth in enumerate(depths(settings)):
            for place, family in enumerate(FAMILIES):
                number = seed + 10_000 * length + 10 * turn + place
                stack = make_haystack(family, length - 1, number, n_questions=settings.needle_questions, depth=depth)
                encoded = tokenizer(stack.context, return_offsets_mapping=True, add_special_tokens=False)
                questions = []
                for question in stack.questions:
                    inside = [
                        1 + i
                        for i, (start, end) in enumerate(encoded["offset_mapping"])
                        if end > start and any(a <= start and end <= b for a, b in question.evidence)
                    ]
                    asked, answer = _ask(tokenizer, question.text, question.answer)
                    questions.append(NeedleQuestion(asked, answer, tuple(inside)))
                context = torch.tensor([tokenizer.bos_token_id, *encoded["input_ids"]], dtype=torch.int64, device="cpu")
                tests.append(NeedleTest(context, tuple(questions)))
    random.Random(seed).shuffle(tests)
    return tuple(tests)


def text_needles(stream: Tensor, tokenizer: Any, settings: MeasureSettings) -> tuple[NeedleTest, ...]:
    """A needle of each kind hidden in running text [n] at the ends of sentences near as many depths, over lengths and depths: one
    context serves a question about each. The order is drawn, so that the first few tests are of all lengths."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tests = []
    everywhere = depths(settings)
    for length in lengths(settings):
        for turn in range(len(everywhere)):
            rng = random.Random(f"{settings.seed}-{length}-{turn}")
            made = [_needle(rng, kind) for kind in range(len(KINDS))]
            needles = [_encode(tokenizer, f" {sentence}") for sentence, _, _ in made]
            room = length - len(bos) - sum(map(len, needles))
            if room < 1:
                continue
            start = rng.randrange(max(1, len(stream) - room))
            text = stream[start : start + room].tolist()
            own = [
                everywhere[(turn + kind * len(everywhere) // len(KINDS)) % len(everywhere)]
                for kind in range(len(KINDS))
            ]
            places = [_sentence_end(text, round(depth * len(text)), tokenizer) for depth in own]
            context, began, last = [*bos], [0] * len(KINDS), 0
            for kind in sorted(range(len(KINDS)), key=lambda kind: (places[kind], kind)):
                context += text[last : places[kind]]
                began[kind], last = len(context), places[kind]
                context += needles[kind]
            context += text[last:]
            questions = []
            for (_, question, value), first, needle in zip(made, began, needles):
                asked, answer = _ask(tokenizer, f"\n{question}", value)
                questions.append(NeedleQuestion(asked, answer, tuple(range(first, first + len(needle)))))
            tests.append(NeedleTest(torch.tensor(context, dtype=torch.int64, device="cpu"), tuple(questions)))
    random.Random(settings.seed).shuffle(tests)
    return tuple(tests)


def lengths(settings: MeasureSettings) -> list[int]:
    """Context lengths in equal steps up to `settings.length`, none below 64 tokens."""
    count = settings.needle_lengths
    return sorted({max(64, round(settings.length * (i + 1) / count)) for i in range(count)})


def depths(settings: MeasureSettings) -> list[float]:
    """Places of the needle, 0 the start of the context, 1 its end: the middles of equal parts."""
    return [(i + 0.5) / settings.needle_depths for i in range(settings.needle_depths)]


def _needle(rng: random.Random, kind: int) -> tuple[str, str, str]:
    key = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    values = (" ".join(str(rng.randrange(10, 100)) for _ in range(3)), rng.choice(DISHES), rng.choice(PLACES))
    sentence, question = KINDS[kind]
    return sentence.format(key=key, value=values[kind]), question.format(key=key), values[kind]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _ask(tokenizer: Any, question: str, answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of a question and of the answer as they stand behind each other: a tokenizer may join across a space."""
    alone, both = _encode(tokenizer, question), _encode(tokenizer, f"{question} {answer}")
    same = 0
    while same < min(len(alone), len(both) - 1) and alone[same] == both[same]:
        same += 1
    return tuple(both[:same]), tuple(both[same:])


def _sentence_end(text: Sequence[int], near: int, tokenizer: Any) -> int:
    """The place behind the sentence end nearest to `near`, or `near` where there is none around it."""
    for distance in range(SEARCH):
        for place in (near - distance, near + distance):
            if 0 < place <= len(text) and tokenizer.decode([text[place - 1]]).strip().endswith((".", "!", "?", "。")):
                return place
    return near
