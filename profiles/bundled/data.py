"""Training sequences: facts among filler or packed densely, and many answered questions and at the end."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .grammar import filler_sentence
from .tasks import Fact, Facts, confusable_keys
from .tokenizer import BOS, vocabulary_ids

SPAN = 10240
"""Position ids reach this far by random gaps, whatever the sequence's length, so that longer texts can be read."""
OTHER_WEIGHT = 0.1
"""Loss weight of a token that is not part of an answer, whose weight is 1."""

_IDS = vocabulary_ids()


def _draw_facts(facts: Facts, dense: bool, room: int) -> list[Fact]:
    """Facts worth ``room`` tokens, question and answer included; mostly pairs where ``dense``."""
    rng = facts.rng
    plain = dense and rng.random() < 0.6
    drawn: list[Fact] = []
    while room > 0:
        kind = 0.0 if plain else rng.random()
        batch: list[Fact]
        if kind < 0.45:
            key = facts.key()
            batch = [facts.pair(key)]
            if rng.random() < 0.3:
                batch += [facts.pair(other) for other in confusable_keys(facts, key, rng.randint(1, 4))]
        elif kind < 0.75:
            key = facts.key()
            batch = [facts.span(key)]
            if rng.random() < 0.3:
                batch += [facts.span(other) for other in confusable_keys(facts, key, rng.randint(1, 2))]
        else:
            batch = [facts.chain()] if facts.chains_left else [facts.span()]
        drawn += batch
        room -= sum(sum(map(len, f.sentences)) + len(f.question) + len(f.answer) + 1 for f in batch)
    return drawn


def training_sequence(rng: random.Random, length: int) -> tuple[list[int], list[int], list[float]]:
    """Token ids, position ids and loss weights of ``length`` + 1 tokens."""
    facts = Facts(rng)
    dense = rng.random() < 0.5
    share = 1.0 if dense else rng.choice((0.1, 0.3, 0.6))
    drawn = _draw_facts(facts, dense, int(length * share))
    stated = [(words, i) for i, fact in enumerate(drawn) for words in fact.sentences]
    asked_tokens = sum(len(f.question) + len(f.answer) + 1 for f in drawn)
    room = length - sum(len(words) for words, _ in stated) - asked_tokens
    stream: list[tuple[list[str], int]] = stated
    while room > 0:
        topic = rng.randrange(12)
        for _ in range(rng.randint(2, 6)):
            words = filler_sentence(rng, topic)
            stream.append((words, -1))
            room -= len(words)
    if dense or share > 0.5:
        rng.shuffle(stream)
    else:  # filler keeps its order, facts fall between
        keyed = [(rng.random(), item) for item in stated[: len(stream)]]
        keyed.sort(key=lambda pair: pair[0])
        stream = [item for _, item in keyed]

    ids, weights, starts = [BOS], [0.0], []
    missing = [len(fact.sentences) for fact in drawn]
    early = rng.choice((0.0, 0.2, 0.5))
    late: list[int] = []

    def say(words: list[str], weight: float) -> None:
        ids.extend([_IDS[word] for word in words])
        weights.extend([weight] * len(words))

    def ask(fact: Fact) -> None:
        starts.append(len(ids))
        say(fact.question, OTHER_WEIGHT)
        say(fact.answer, 1.0)
        say(["."], OTHER_WEIGHT)

    pending: list[int] = []
    for words, i in stream:
        starts.append(len(ids))
        say(words, OTHER_WEIGHT)
        if i >= 0:
            missing[i] -= 1
            if not missing[i]:
                (pending if rng.random() < early else late).append(i)
        if pending and rng.random() < 0.1:
            ask(drawn[pending.pop(rng.randrange(len(pending)))])
    late += pending
    rng.shuffle(late)
    for i in late:
        ask(drawn[i])
    while len(ids) <= length:
        starts.append(len(ids))
        say(filler_sentence(rng), OTHER_WEIGHT)
    return ids[: length + 1], _positions(rng, length, starts), weights[: length + 1]


def _positions(rng: random.Random, length: int, starts: list[int]) -> list[int]:
    """Position ids of ``length`` tokens; half of the time with gaps before some sentences, up to SPAN in all."""
    positions = list(range(length))
    if rng.random() < 0.5 or length >= SPAN:
        return positions
    total = rng.randrange(SPAN - length)
    gaps = [0] * length
    inside = [s for s in starts if s < length]
    for at in rng.choices(inside, k=rng.choice((1, 2, 4, 16))):
        gaps[at] += 1
    each = total // sum(gaps)
    shift = 0
    for i, gap in enumerate(gaps):
        shift += gap * rng.randint(each // 2, each) if gap else 0
        positions[i] += shift
    return positions


def training_batch(rng: random.Random, length: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, positions, targets and target weights, each [tokens / length, length]."""
    rows = [training_sequence(rng, length) for _ in range(max(1, tokens // length))]
    ids = torch.tensor([row[0] for row in rows], dtype=torch.int64, device="cpu")
    positions = torch.tensor([row[1] for row in rows], dtype=torch.int64, device="cpu")
    weights = torch.tensor([row[2] for row in rows], dtype=torch.float32, device="cpu")
    return ids[:, :-1], positions, ids[:, 1:], weights[:, 1:]
