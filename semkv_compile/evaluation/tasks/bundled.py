"""The bundled model's task families as tasks: exact answers, any number of questions per context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from semkv.evaluation.samples import Sample, check_lengths, families, make_sample
from semkv.evaluation.tasks.base import Kind, Task


@dataclass(frozen=True)
class FamilyTask(Task):
    """`single`, `multi`, `confusable` or `dense`; its length counts the context alone."""

    name: str

    kind: ClassVar[Kind] = "exact"
    questions_per_context: ClassVar[int | None] = None

    def check_length(self, length: int, max_positions: int | None) -> None:
        check_lengths([length], max_positions)

    def make(self, tokenizer: Any, length: int, index: int, *, seed: int, questions: int) -> Sample:
        return make_sample(tokenizer, self.name, length, index, seed=seed, questions=questions)


def family_tasks() -> dict[str, Task]:
    """All families by name."""
    return {name: FamilyTask(name) for name in families()}
