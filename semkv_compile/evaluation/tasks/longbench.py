"""LongBench (Bai et al. 2024, ACL): twenty-one data sets with their own prompts, truncation and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.longbench_sets import DATA_SETS, DataSet
from semkv.evaluation.tasks.metrics import (
    chinese_plain_words,
    chinese_words,
    classification,
    code_similarity,
    number_share,
    paragraph_number,
    question_f1,
)
from semkv.evaluation.tasks.rouge import rouge_l
from semkv.evaluation.tasks.sources import Source


@dataclass(frozen=True)
class LongBench(TextTask):
    """`longbench_NAME`: a row's context, then its question; a prompt that is too long loses its middle.

    dataset: which of the data sets. longbench: a folder or .zip with NAME.jsonl files, one such file, or
    `zai-org/LongBench` on the Hub; rows have input, context, answers and all_classes.
    """

    dataset: str = "qasper"
    longbench: Source | None = None

    tolerated: ClassVar[float] = 0.01
    cut: ClassVar[bool] = True

    @property
    def _set(self) -> DataSet:
        return DATA_SETS[self.dataset]

    @property
    def chats(self) -> bool:
        """False for data sets of examples and code, which LongBench writes without a chat template."""
        return not self._set.plain

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        source = self.need(self.longbench, "longbench", f"LongBench's {self.dataset}.jsonl")
        rows = [row for row in source.rows(self.dataset) if row.get("dataset", self.dataset) == self.dataset]
        if not rows:
            raise ConfigError(
                f"task {self.name!r}: --source longbench={source.place} holds no row of the data set {self.dataset!r}"
            )
        for number, row in enumerate(rows, start=1):
            source.fields(row, ("input", "context", "answers"), number)
        if self._set.metric == "classes":
            source.fields(rows[0], ("all_classes",), 1)
        if self._set.metric in ("f1_zh", "rouge_zh"):
            chinese_words("")
        return rows

    @property
    def available(self) -> int | None:
        return len(self._rows)

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        row = self._rows[index]
        after, context = self._set.after, row["context"]
        if after.startswith("{input}") and self._set.metric == "code":
            # The unfinished file belongs to what is read; what is asked for is its next line.
            after, context = after.removeprefix("{input}"), context + row["input"]
        ask = Ask(
            after.replace("{input}", row["input"]),
            tuple(row["answers"]),
            self._set.new_tokens,
            choices=tuple(row.get("all_classes") or ()),
        )
        return Prompt(self._set.before + context, (ask,))

    def score(self, prediction: str, question: Question) -> float:
        text = prediction.lstrip("\n").split("\n")[0] if self._set.few_shot else prediction
        return max((self._against(text, answer, question.choices) for answer in question.references), default=0.0)

    def _against(self, text: str, answer: str, choices: tuple[str, ...]) -> float:
        match self._set.metric:
            case "f1":
                return question_f1(text, answer)
            case "f1_zh":
                return question_f1(text, answer, chinese_plain_words)
            case "rouge":
                return rouge_l(text, answer)
            case "rouge_zh":
                return rouge_l(" ".join(chinese_words(text)), " ".join(chinese_words(answer)))
            case "classes":
                return classification(text, answer, choices)
            case "count":
                return number_share(text, answer)
            case "paragraph":
                return number_share(text, paragraph_number(answer, "Paragraph"))
            case "paragraph_zh":
                return number_share(text, paragraph_number(answer, "\u6bb5\u843d"))
            case "code":
                return code_similarity(text, answer)
