"""What needles are hidden in: a repeated sentence, a user's text, or generated prose; and how they are put into it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentence that pass-key tasks (Mohtashami and Jaggi 2023), RULER and InfiniteBench repeat."""

GENERATED_WORDS = 20_000


def words_of(text: str) -> list[str]:
    """The words of a text with single spaces between them, line breaks and indents gone."""
    return text.split()


CLOSERS = "\"'\u201d\u2019)]"
BOUNDARY = re.compile(rf"[.!?][{re.escape(CLOSERS)}]* ")
ABBREVIATIONS = frozenset(
    words_of("mr mrs ms dr prof sr jr st vs etc e.g i.e cf no vol fig mt gen col capt lt rev hon messrs")
)


def repeated(words: Sequence[str], count: int) -> list[str]:
    """The first `count` words of a text that starts again where it ends."""
    repeats = -(-count // len(words))
    return list((list(words) * repeats)[:count])


def sentences_of(text: str) -> list[str]:
    """The sentences of a text without line breaks; joined by spaces they are the text again.

    A sentence ends with a full stop, question or exclamation mark and what closes quotes and brackets, before a
    space; not after an initial, a known abbreviation or where a small letter follows.
    """
    found, start = [], 0
    for match in BOUNDARY.finditer(text):
        stop = match.end() - 1
        following = text[match.end() : match.end() + 1]
        last = text[start : match.start()].rsplit(" ", 1)[-1].lstrip("(\"'\u201c\u2018").lower()
        initial = text[match.start()] == "." and len(last) == 1 and last.isalpha() and last != "i"
        if following.islower() or initial or (text[match.start()] == "." and last in ABBREVIATIONS):
            continue
        found.append(text[start:stop])
        start = match.end()
    return [*found, text[start:]] if start < len(text) else found


def hide(sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """A text with each needle put before the sentence at its depth, 0 = first, 1 = after the last; depths ascend."""
    places = [int(len(sentences) * depth) for depth in depths]
    parts: list[str] = []
    for needle, start, stop in zip(needles, [0, *places], places):
        parts += [" ".join(sentences[start:stop]), needle]
    parts.append(" ".join(sentences[places[-1] if places else 0 :]))
    return " ".join(parts)


def prose(seed: int, n_words: int = GENERATED_WORDS) -> str:
    """Sentences of the bundled grammar, written as English is: for users who have no text at hand."""
    from semkv.profiles.bundled.grammar import filler_sentence

    rng = random.Random(f"haystack-{seed}")
    parts, total = [], 0
    while total < n_words:
        topic = rng.randrange(12)
        for _ in range(rng.randint(2, 6)):
            words = filler_sentence(rng, topic)
            text = re.sub(r" ([.,?:])", r"\1", " ".join(words))
            parts.append(text[:1].upper() + text[1:])
            total += len(words)
    return " ".join(parts)
