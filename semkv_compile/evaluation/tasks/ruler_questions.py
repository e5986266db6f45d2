"""RULER's question answering: a question whose paragraph stands among others, from SQuAD or HotpotQA (section 3.4).

Natural Questions with their passages (Liu et al. 2024, "Lost in the Middle") are asked in the same words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks.base import Ask, Count, Prompt, TextTask
from semkv.evaluation.tasks.fitting import largest
from semkv.evaluation.tasks.metrics import any_contained
from semkv.evaluation.tasks.sources import Source

RULE = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
INSTRUCTION = f"{RULE}\n\nThe following are given documents.\n\n"
QUESTION = f"\n\n{RULE}\n\nQuestion: {{query}}"
PREFIX = " Answer:"
NEW_TOKENS = 32
SOURCES = {
    "squad": "SQuAD's questions (the JSON of version 1 or 2, or rows), `rajpurkar/squad_v2` on the Hub",
    "hotpotqa": "HotpotQA's questions (distractor setting), `hotpotqa/hotpot_qa` on the Hub",
    "nq": "Natural Questions with the passage that answers each (question, answers, gold), as of `nelson-liu/lost-in-the-middle`",
}


@dataclass(frozen=True)
class Item:
    """A question; gold: the documents that answer it; near: documents of the same article, the first to be added."""

    query: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...] = ()


def read_squad(source: Source) -> Iterator[Item]:
    """Answerable questions of SQuAD: articles with paragraphs, or a row per question with its title."""
    rows = source.rows()
    articles: dict[str, list[tuple[str, list[tuple[str, tuple[str, ...]]]]]] = {}
    if "data" in rows[0]:
        for article in rows[0]["data"]:
            paragraphs = [
                (
                    p["context"],
                    [
                        (q["question"], tuple(a["text"] for a in q["answers"]))
                        for q in p["qas"]
                        if not q.get("is_impossible", False)
                    ],
                )
                for p in article["paragraphs"]
            ]
            articles.setdefault(article["title"], []).extend(paragraphs)
    else:
        by_paragraph: dict[tuple[str, str], list[tuple[str, tuple[str, ...]]]] = {}
        for number, row in enumerate(rows, start=1):
            source.fields(row, ("title", "context", "question", "answers"), number)
            asked = by_paragraph.setdefault((row["title"], row["context"]), [])
            if row["answers"]["text"]:
                asked.append((row["question"], tuple(row["answers"]["text"])))
        for (title, context), asked in by_paragraph.items():
            articles.setdefault(title, []).append((context, asked))
    for paragraphs in articles.values():
        for context, asked in paragraphs:
            near = tuple(dict.fromkeys(other for other, _ in paragraphs if other != context))
            for query, answers in asked:
                yield Item(query, answers, (context,), near)
    # Paragraphs without an answerable question only fill.
    yield Item("", (), tuple(dict.fromkeys(c for paragraphs in articles.values() for c, _ in paragraphs)))


def read_hotpotqa(source: Source) -> Iterator[Item]:
    """Questions of HotpotQA with their ten paragraphs; a row without a question only adds documents."""
    for number, row in enumerate(source.rows(), start=1):
        source.fields(row, ("question", "answer", "context"), number)
        context: Any = row["context"]
        pairs = zip(context["title"], context["sentences"]) if isinstance(context, dict) else context
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in pairs)
        yield Item(row["question"], (row["answer"],), documents)


def read_nq(source: Source) -> Iterator[Item]:
    """Natural Questions, each with one passage; the others' passages stand around it."""
    for number, row in enumerate(source.rows(), start=1):
        source.fields(row, ("question", "answers", "gold"), number)
        gold: Any = row["gold"]
        yield Item(row["question"], tuple(row["answers"]), (f"{gold['title']}\n{gold['text']}",))


READERS = {"squad": read_squad, "hotpotqa": read_hotpotqa, "nq": read_nq}


@dataclass(frozen=True)
class RulerQuestions(TextTask):
    """`qa_1` (SQuAD), `qa_2` (HotpotQA) and `nq` (Natural Questions): documents with the question's own among them.

    squad, hotpotqa, nq: the data; a task takes the one of its name.
    """

    dataset: Literal["squad", "hotpotqa", "nq"] = "squad"
    squad: Source | None = None
    hotpotqa: Source | None = None
    nq: Source | None = None

    monotone: ClassVar[bool] = True

    def uses(self, source: str) -> bool:
        return source == self.dataset

    @cached_property
    def _items(self) -> tuple[list[Item], list[str]]:
        """Questions in the data's order, and all documents."""
        source = self.need(getattr(self, self.dataset), self.dataset, SOURCES[self.dataset])
        try:
            items = list(READERS[self.dataset](source))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"--source {self.dataset}={source.place}: not in the layout of {SOURCES[self.dataset]} ({error!r})"
            ) from error
        documents = sorted({document for item in items for document in item.gold})
        asked = [item for item in items if item.query]
        if not asked:
            raise ConfigError(f"--source {self.dataset}={source.place}: holds no answerable question")
        return asked, documents

    @property
    def available(self) -> int | None:
        return len(self._items[0])

    def prompt(self, length: int, index: int, seed: int, questions: int, count: Count) -> Prompt:
        items, documents = self._items
        item = items[index]
        rng = random.Random(f"{self.name}-{length}-{seed}-{index}")
        own = {*item.gold, *item.near}
        rest = [document for document in documents if document not in own]
        order = [*item.gold, *rng.sample(item.near, len(item.near)), *rng.sample(rest, len(rest))]
        shuffle = rng.random()
        ask_text = QUESTION.format(query=item.query)

        def render(n: int) -> Prompt:
            # Where all documents together are too short they come again, as in RULER.
            taken = [order[i % len(order)] for i in range(n)]
            random.Random(shuffle).shuffle(taken)
            written = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(taken, start=1))
            context = INSTRUCTION + written
            depth = context.index(item.gold[0]) / len(context)
            return Prompt(context, (Ask(ask_text, item.answers, NEW_TOKENS, PREFIX, depth),))

        low = len(item.gold)
        units = largest(lambda n: count(render(n)) <= length, low, max(low, length // 150))
        if units is None:
            raise self.too_short(length, f"question {index} has {low} documents of its own that need more")
        return render(units)

    def score(self, prediction: str, question: Question) -> float:
        return any_contained(prediction, question.references)
