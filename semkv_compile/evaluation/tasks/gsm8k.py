"""GSM8K with many solved problems in front: does reasoning by example survive a compressed context?

Cobbe et al. 2021; the many-shot form (as many solved problems as the length holds) is what papers on KV compression
use it for. Prompt, stop and extraction follow the common harness: `Question:` and `Answer:`, the number after `####`,
else the last number.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.fitting import largest
from semkv.evaluation.tasks.sources import Source

MARKED = re.compile(r"####\s*\$?(-?[0-9][0-9.,]*)")
NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")
NEW_TOKENS = 256


def final_number(text: str) -> str | None:
    """The number after `####`, else the last one, without currency, thousands and a closing stop; None without any."""
    marked = MARKED.search(text)
    found = marked[1] if marked else (NUMBER.findall(text) or [None])[-1]
    if found is None:
        return None
    plain = found.replace("$", "").replace(",", "").rstrip(".")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def solved(row: dict[str, Any]) -> str:
    """A problem with its solution, as an example."""
    return f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"


@dataclass(frozen=True)
class ManyShot(TextTask):
    """`gsm8k`: solved problems up to the length, then one to solve.

    Questions about one set of examples may share it. shots: the most examples; 0 for as many as fit. new_tokens: room
    for a solution. gsm8k: problems to solve (fields question and answer), `openai/gsm8k` on the Hub. gsm8k_train:
    solved problems to show.
    """

    shots: int = 0
    new_tokens: int = NEW_TOKENS
    gsm8k: Source | None = None
    gsm8k_train: Source | None = None

    questions_per_context: ClassVar[int | None] = None
    stop: ClassVar[tuple[str, ...]] = ("Question:",)
    tolerated: ClassVar[float] = 0.01

    @cached_property
    def _problems(self) -> list[dict[str, Any]]:
        return self._read(self.need(self.gsm8k, "gsm8k", "problems (rows with question and answer)"))

    @cached_property
    def _examples(self) -> list[dict[str, Any]]:
        return self._read(self.need(self.gsm8k_train, "gsm8k_train", "solved problems (rows with question and answer)"))

    def _read(self, source: Source) -> list[dict[str, Any]]:
        rows = source.rows("test" if source is self.gsm8k else "train")
        for number, row in enumerate(rows, start=1):
            source.fields(row, ("question", "answer"), number)
            if final_number(row["answer"]) is None:
                raise ConfigError(f"--source {source.key}={source.place}, row {number}: the answer holds no number")
        return rows

    @property
    def available(self) -> int | None:
        return len(self._problems)

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        problems = self._problems
        examples = list(self._examples)
        random.Random(f"{self.name}-{seed}-{index}").shuffle(examples)
        chosen = [problems[i] for i in range(index * questions, min((index + 1) * questions, len(problems)))]
        asks = tuple(
            Ask(f"Question: {row['question']}\n", (str(final_number(row["answer"])),), self.new_tokens, "Answer:")
            for row in chosen
        )

        def render(n: int) -> Prompt:
            return Prompt("".join(solved(row) for row in examples[:n]), asks)

        most = min(self.shots or len(examples), len(examples))
        units = largest(lambda n: count(render(n)) <= length, 1, min(max(length // 150, 1), most), most)
        if units is None:
            raise self.too_short(
                length, f"a solved problem, a question and {self.new_tokens} tokens of answer need more"
            )
        return render(units)

    def score(self, prediction: str, question: Question) -> float:
        return float(final_number(prediction) == question.references[0])
