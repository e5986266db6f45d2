"""LongBench-Write and LongWrite-Ruler (LongWriter, Bai et al. 2024): does a long answer reach its length?

The score is the benchmark's length score. Its other score, the judgement of the text's quality by a large model, needs
that model and is not computed; the texts are kept in the rows for whoever has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.metrics import length_score, written_words
from semkv.evaluation.tasks.sources import Source


@dataclass(frozen=True)
class LongWriter(TextTask):
    """`longwriter`: an instruction with a required number of words; the answer fills what the length leaves.

    longwriter: rows with prompt and length (words), as in the benchmark's longbench_write_en.jsonl and
    longwrite_ruler.jsonl.
    """

    longwriter: Source | None = None

    has_question: ClassVar[bool] = False
    tolerated: ClassVar[float] = 0.01

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        source = self.need(self.longwriter, "longwriter", "instructions (rows with prompt and length)")
        rows = source.rows()
        for number, row in enumerate(rows, start=1):
            source.fields(row, ("prompt", "length"), number)
        return rows

    @property
    def available(self) -> int | None:
        return len(self._rows)

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        row = self._rows[index]

        def render(new_tokens: int) -> Prompt:
            return Prompt(row["prompt"], (Ask("", (str(row["length"]),), new_tokens),))

        room = length - count(render(0))
        if room < 1:
            raise self.too_short(length, f"instruction {index} has {length - room} tokens")
        return render(room)

    def score(self, prediction: str, question: Question) -> float:
        return length_score(int(question.references[0]), written_words(prediction))
