"""LongBench v2 (Bai et al. 2025): hard questions about long texts with four choices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.sources import Source

BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
AFTER = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}"
    '\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
NEW_TOKENS = 128
FIELDS = ("question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context")


def chosen(text: str) -> str | None:
    """The letter that a response commits to; None where it names none in the form that was asked for."""
    plain = text.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        found = re.search(pattern, plain)
        if found:
            return found[1]
    return None


@dataclass(frozen=True)
class LongBenchV2(TextTask):
    """`longbench_v2`: the zero-shot prompt without a chain of thought; one that is too long loses its middle.

    longbench_v2: rows with question, choice_A to choice_D, answer and context, `zai-org/LongBench-v2` on the Hub.
    difficulty, words: take rows of one difficulty (`easy`, `hard`) or length (`short`, `medium`, `long`) only; empty
    for all.
    """

    difficulty: str = ""
    words: str = ""
    longbench_v2: Source | None = None

    tolerated: ClassVar[float] = 0.01
    cut: ClassVar[bool] = True

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        source = self.need(self.longbench_v2, "longbench_v2", "LongBench v2's rows")
        rows = source.rows("data")
        for number, row in enumerate(rows, start=1):
            source.fields(row, FIELDS, number)
        wanted = {"difficulty": self.difficulty, "length": self.words}
        found = [row for row in rows if all(not value or row.get(name) == value for name, value in wanted.items())]
        if not found:
            raise ConfigError(
                f"task {self.name!r}: no row of difficulty {self.difficulty or 'any'!r} and length {self.words or 'any'!r}"
                "; expected easy or hard, and short, medium or long"
            )
        return found

    @property
    def available(self) -> int | None:
        return len(self._rows)

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        row = self._rows[index]
        choices = {letter: str(row[f"choice_{letter}"]).strip() for letter in "ABCD"}
        text = AFTER.format(question=str(row["question"]).strip(), **choices)
        return Prompt(BEFORE + str(row["context"]).strip(), (Ask(text, (str(row["answer"]).strip(),), NEW_TOKENS),))

    def score(self, prediction: str, question: Question) -> float:
        return float(chosen(prediction) == question.references[0])
