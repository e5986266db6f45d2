"""RULER's variable tracking: which names hold a value after a chain of assignments (Hsieh et al. 2024, section 3.2)."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.fitting import largest
from semkv.evaluation.tasks.haystacks import NOISE
from semkv.evaluation.tasks.metrics import share_contained

INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
NEW_TOKENS = 30
EXAMPLE_TOKENS = 500
EXAMPLE_STEP = 5
"""The example in front is the longest below 500 tokens whose number of sentences is a multiple of five."""


@dataclass(frozen=True)
class Chain:
    """Names in the order of assignment, and the value that all of them hold."""

    names: tuple[str, ...]
    value: str

    @property
    def lines(self) -> list[str]:
        """The assignments."""
        first = f"VAR {self.names[0]} = {self.value}"
        return [first, *[f"VAR {new} = VAR {old} " for old, new in zip(self.names, self.names[1:])]]


def draw_chains(rng: random.Random, chains: int, hops: int, letters: int) -> list[Chain]:
    """Chains with names and values of their own."""
    names: list[str] = []
    values: list[str] = []
    while len(names) < chains * (hops + 1):
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    while len(values) < chains:
        value = str(rng.randint(10000, 99998))
        if value not in values:
            values.append(value)
    width = hops + 1
    return [Chain(tuple(names[i * width : (i + 1) * width]), value) for i, value in enumerate(values)]


def scatter(noises: int, chains: list[Chain], places: list[list[float]]) -> str:
    """The assignments in their order between `noises` sentences, each before the sentence at its place in [0, 1)."""
    lines = [NOISE] * noises
    for chain, fractions in zip(chains, places):
        base = len(lines)
        for moved, (line, fraction) in enumerate(zip(chain.lines, sorted(fractions))):
            lines.insert(int(fraction * base) + moved, line)
    return "\n".join(lines).replace(". \n", ".\n")


@dataclass(frozen=True)
class RulerTracking(TextTask):
    """`vt`: a solved example, then chains of assignments among noise, and a value whose names are asked for.

    chains: how many. hops: assignments of a chain after its first. noise: the sentence between is fixed.
    """

    chains: int = 1
    hops: int = 4

    monotone: ClassVar[bool] = True

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        rng = random.Random(f"{self.name}-{length}-{seed}-{index}")
        example = self._example(rng, count)
        chains = draw_chains(rng, self.chains, self.hops, 5)
        places = [[rng.random() for _ in chain.lines] for chain in chains]
        asked = chains[0]

        def render(noises: int) -> Prompt:
            text = example + "\n" + INSTRUCTION + scatter(noises, chains, places)
            depth = text.index(chains[0].lines[0]) / len(text)
            return Prompt(text, (self._ask(asked, depth),))

        low = len(chains) * (self.hops + 1)
        units = largest(lambda n: count(render(n)) <= length, low, max(low, length // 27))
        if units is None:
            raise self.too_short(length, f"the solved example, the chains and {NEW_TOKENS} tokens of answer need more")
        return render(units)

    def _ask(self, chain: Chain, depth: float | None) -> Ask:
        prefix = PREFIX.format(count=self.hops + 1, value=chain.value)
        return Ask(QUESTION.format(value=chain.value), chain.names, NEW_TOKENS, prefix, depth)

    def _example(self, rng: random.Random, count: Count) -> str:
        """A short solved problem, with names of three letters."""
        chains = draw_chains(rng, self.chains, min(10, self.hops), 3)
        places = [[rng.random() for _ in chain.lines] for chain in chains]
        ask = self._ask(chains[0], None)

        def write(noises: int) -> str:
            answer = " ".join(chains[0].names)
            return INSTRUCTION + scatter(noises, chains, places) + ask.text + ask.prefix + " " + answer + "\n"

        noises = 2 * EXAMPLE_STEP
        while count(Prompt(write(noises), (Ask("", (), 0),))) <= EXAMPLE_TOKENS:
            noises += EXAMPLE_STEP
        return write(noises - EXAMPLE_STEP)

    def score(self, prediction: str, question: Question) -> float:
        return share_contained(prediction, question.references)
