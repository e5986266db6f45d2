"""The four task families: contexts with known evidence, and questions whose answers are exact.

single      one key-value sentence among filler prose
multi       two values of one key, or a chain of three facts, each in a sentence of its own
confusable  many key-value sentences whose keys share words with the one that is asked (also with its words swapped)
dense       every sentence is a key-value pair that may be asked, about 100 pairs in 1.2K tokens

Text is words and punctuation with a space between them. Everything is deterministic in the seed. A ``Fact`` is the
common unit: the sentence that states something, its place among the sentences, and the question that asks for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .grammar import ADJECTIVES, MONTHS, NOUNS, NUMBERS, PLACES, PUNCTUATION, filler_sentence, filler_words

FAMILIES = ("single", "multi", "confusable", "dense")

# {a} {n} the key, {v} its value; the words just before the value are always key and link, as in natural word order.
PAIR_FORMS = (
    "the code for {a} {n} is {v} .",
    "remember that {a} {n} has {v} as its code .",
    "we set the code of {a} {n} to {v} .",
)
PAIR_QUESTIONS = (
    "what is the code for {a} {n} ? the code for {a} {n} is",
    "which code belongs to {a} {n} ? it is",
    "give the code of {a} {n} :",
)
START_FORMS = ("the watch guards {a} {n} from {v} .", "each day they open {a} {n} from {v} .")
END_FORMS = ("the watch guards {a} {n} until {v} .", "each day they open {a} {n} until {v} .")
SPAN_QUESTIONS = ("when is {a} {n} open ? they open {a} {n} from", "give the hours of {a} {n} : from")
LINK_FORMS = ("by road {x} reaches {y} .", "the train from {x} reaches {y} .")
CHAIN_QUESTIONS = ("where does the road from {x} lead ? {x} reaches", "follow the road : {x} reaches")


@dataclass(frozen=True)
class Question:
    """A question about a context, to be appended to it; the answer is the exact continuation.

    family: one of FAMILIES. text: starts with a space. answer: words with single spaces, a fixed number per form.
    evidence: character ranges [start, end) in ``Haystack.context`` of the sentences that hold the answer.
    depth: place of the first of them, 0 = start of the context, 1 = end.
    """

    family: str
    text: str
    answer: str
    evidence: tuple[tuple[int, int], ...]
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A context and the questions that can be asked of it."""

    family: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Fact:
    """Sentences that belong together and the question that needs them all: words, not text."""

    sentences: tuple[list[str], ...]
    question: list[str]
    answer: list[str]


def _fill(form: str, **slots: str) -> list[str]:
    return form.format(**slots).split()


def _value(rng: random.Random, count: int) -> str:
    return " ".join(NUMBERS[int(rng.random() * len(NUMBERS))] for _ in range(count))


class Facts:
    """Draws facts of one context: no key and no chain node is used twice."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self._keys: set[tuple[str, str]] = set()
        self._places = list(PLACES)
        rng.shuffle(self._places)

    def key(self) -> tuple[str, str]:
        """An unused adjective-noun key."""
        while True:
            draw = self.rng.random
            key = (ADJECTIVES[int(draw() * len(ADJECTIVES))], NOUNS[int(draw() * len(NOUNS))])
            if self.claim(key):
                return key

    def claim(self, key: tuple[str, str]) -> bool:
        """Whether ``key`` was free; it no longer is."""
        if key in self._keys:
            return False
        self._keys.add(key)
        return True

    @property
    def chains_left(self) -> int:
        return len(self._places) // 4

    def pair(self, key: tuple[str, str] | None = None) -> Fact:
        """A key with a value of three numbers."""
        rng = self.rng
        a, n = key or self.key()
        value = _value(rng, 3)
        return Fact(
            (_fill(rng.choice(PAIR_FORMS), a=a, n=n, v=value),),
            _fill(rng.choice(PAIR_QUESTIONS), a=a, n=n),
            value.split(),
        )

    def span(self, key: tuple[str, str] | None = None) -> Fact:
        """A key with two values of two numbers, each in its own sentence."""
        rng = self.rng
        a, n = key or self.key()
        start, end = _value(rng, 2), _value(rng, 2)
        sentences = (
            _fill(rng.choice(START_FORMS), a=a, n=n, v=start),
            _fill(rng.choice(END_FORMS), a=a, n=n, v=end),
        )
        return Fact(sentences, _fill(rng.choice(SPAN_QUESTIONS), a=a, n=n), [*start.split(), "until", *end.split()])

    def chain(self) -> Fact:
        """Three facts x -> y -> z -> w between four places."""
        rng = self.rng
        x, y, z, w = (self._places.pop() for _ in range(4))
        sentences = tuple(_fill(rng.choice(LINK_FORMS), x=s, y=t) for s, t in ((x, y), (y, z), (z, w)))
        return Fact(sentences, _fill(rng.choice(CHAIN_QUESTIONS), x=x), [y, "reaches", z, "reaches", w])


def confusable_keys(facts: Facts, key: tuple[str, str], count: int) -> list[tuple[str, str]]:
    """At most ``count`` unused keys that share the adjective or the noun of ``key``, or that swap its two words."""
    rng, (a, n) = facts.rng, key
    keys = [(n, a)] if facts.claim((n, a)) else []
    for turn in range(4 * count):
        if len(keys) >= count:
            break
        other = (a, rng.choice(NOUNS)) if turn % 2 else (rng.choice(ADJECTIVES), n)
        if facts.claim(other):
            keys.append(other)
    return keys


def vocabulary() -> list[str]:
    """Every word that filler and tasks can produce, sorted, punctuation and numbers first."""
    words = filler_words() | set(ADJECTIVES) | set(NOUNS) | set(PLACES) | set(MONTHS)
    forms = (PAIR_FORMS, PAIR_QUESTIONS, START_FORMS, END_FORMS, SPAN_QUESTIONS, LINK_FORMS, CHAIN_QUESTIONS)
    for form in (form for group in forms for form in group):
        words.update(word for word in form.split() if "{" not in word)
    words -= set(NUMBERS) | set(PUNCTUATION)
    return [*PUNCTUATION, *NUMBERS, *sorted(words)]


def _word_count(text: str) -> int:
    return len(text.split())


def _draw_facts(family: str, facts: Facts, budget: int, n_questions: int) -> tuple[list[Fact], list[Fact]]:
    """Facts that are asked, and facts that only confuse, for a context of about ``budget`` tokens."""
    rng = facts.rng
    if family == "single":
        return [facts.pair() for _ in range(n_questions)], []
    if family == "multi":
        asked = [
            facts.chain() if facts.chains_left > 4 and rng.random() < 0.5 else facts.span() for _ in range(n_questions)
        ]
        others = [facts.span() for _ in range(min(4, budget // 200))]
        others += [facts.chain() for _ in range(min(4, budget // 200, facts.chains_left))]
        return asked, others
    if family == "confusable":
        asked, others = [], []
        each = max(2, min(24, budget // 40) // n_questions)
        for _ in range(n_questions):
            key = facts.key()
            asked.append(facts.pair(key))
            others += [facts.pair(other) for other in confusable_keys(facts, key, each)]
        return asked, others
    raise ValueError(f"family is {family!r}, expected one of {FAMILIES}")


def _context(sentences: list[list[str]]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and each sentence's character range in it."""
    parts, ranges, at = [], [], 0
    for words in sentences:
        part = " ".join(words)
        ranges.append((at, at + len(part)))
        parts.append(part)
        at += len(part) + 1
    return " ".join(parts), ranges


def _fit(pieces: list[list[str]], n_tokens: int, count: Callable[[str], int]) -> list[list[str]]:
    """The longest prefix of ``pieces`` (sentences) of at most ``n_tokens`` tokens."""
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high + 1) // 2
        if count(_context(pieces[:middle])[0]) <= n_tokens:
            low = middle
        else:
            high = middle - 1
    return pieces[:low]


def _prose(rng: random.Random, n_words: int) -> list[list[str]]:
    """Filler sentences of at least ``n_words`` words in all; a topic lasts a few sentences."""
    sentences, total = [], 0
    while total < n_words:
        topic = rng.randrange(12)
        for _ in range(rng.randint(2, 6)):
            sentences.append(filler_sentence(rng, topic))
            total += len(sentences[-1])
    return sentences


def make_haystack(
    family: str,
    n_tokens: int,
    seed: int,
    *,
    count_tokens: Callable[[str], int] | None = None,
    n_questions: int = 1,
    depth: float | None = None,
) -> Haystack:
    """A context of at most ``n_tokens`` tokens (and close to it) with ``n_questions`` questions about it.

    count_tokens counts a text's tokens; by default its words, which are the bundled tokenizer's tokens without the
    bos token. The question and the answer are not part of the ``n_tokens``. ``depth`` in [0, 1] asks for the
    evidence's place (single, confusable and dense; the first question's). Raises ValueError for an unknown family or
    too few tokens for the facts.
    """
    count = count_tokens or _word_count
    rng = random.Random(f"{family}-{seed}")
    facts = Facts(rng)
    if family == "dense":
        return _dense_haystack(n_tokens, count, facts, n_questions, depth)
    asked, others = _draw_facts(family, facts, n_tokens, n_questions)
    stated = [words for fact in asked + others for words in fact.sentences]
    room = n_tokens - count(_context(stated)[0]) - 2
    filler = _fit(_prose(rng, max(room, 1)), room, count) if room > 0 else []
    if room < 0:
        raise ValueError(
            f"{n_tokens} tokens are too few for {len(stated)} sentences of evidence ({n_tokens - room} tokens)"
        )
    # Each fact's sentences fall at random places between filler sentences; sorting keeps equal places in order of
    # drawing.
    first = asked[0].sentences[0]
    places = [
        (depth if words is first and depth is not None and len(asked[0].sentences) == 1 else rng.random(), i)
        for i, words in enumerate(stated)
    ]
    merged: list[list[str]] = []
    at = 0
    for place, i in sorted(places):
        stop = round(place * len(filler))
        merged += filler[at:stop]
        merged.append(stated[i])
        at = stop
    merged += filler[at:]
    return _finish(family, merged, asked)


def _dense_haystack(
    n_tokens: int, count: Callable[[str], int], facts: Facts, n_questions: int, depth: float | None
) -> Haystack:
    """Nothing but key-value sentences, each of which may be asked."""
    pairs = [facts.pair() for _ in range(n_tokens // 9 + 1)]
    kept = len(_fit([pair.sentences[0] for pair in pairs], n_tokens, count))
    if kept < n_questions:
        raise ValueError(f"{n_tokens} tokens hold {kept} pairs, fewer than the {n_questions} questions asked for")
    asked = facts.rng.sample(range(kept), n_questions)
    if depth is not None:
        place = round(depth * (kept - 1))
        asked = [place, *[i for i in asked if i != place]][:n_questions]
    return _finish("dense", [pair.sentences[0] for pair in pairs[:kept]], [pairs[i] for i in asked])


def _finish(family: str, sentences: list[list[str]], asked: list[Fact]) -> Haystack:
    context, ranges = _context(sentences)
    where = {id(words): bounds for words, bounds in zip(sentences, ranges, strict=True)}
    questions = []
    for fact in asked:
        evidence = tuple(where[id(words)] for words in fact.sentences)
        depth = min(start for start, _ in evidence) / len(context)
        questions.append(Question(family, " " + " ".join(fact.question), " ".join(fact.answer), evidence, depth))
    return Haystack(family, context, tuple(questions))


def make_text(
    n_tokens: int, seed: int, *, with_tasks: bool = False, count_tokens: Callable[[str], int] | None = None
) -> str:
    """Prose of at most ``n_tokens`` tokens for calibration: filler, a third as many facts ``with_tasks``."""
    count = count_tokens or _word_count
    rng = random.Random(f"text-{seed}")
    facts = Facts(rng)
    sentences: list[list[str]] = []
    for words in _prose(rng, n_tokens):
        sentences.append(words)
        if with_tasks and rng.random() < 1 / 3:
            sentences += (facts.pair() if rng.random() < 0.7 else facts.span()).sentences
    return _context(_fit(sentences, n_tokens, count))[0]
