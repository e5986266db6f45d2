"""One question put to a compressed state: exact tokens, written text, or the likelihood of a text that goes on.

Answers are talks (`semkv.evaluation.talking`): they say what their state is to read, and somebody else runs the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from semkv.evaluation.agreement import Comparison, Told
from semkv.evaluation.attention_mass import MassWatch, add_masses
from semkv.evaluation.samples import Question
from semkv.evaluation.schema import Answer, Mass, Row, Usage, Zoom
from semkv.evaluation.subject import add_zooms, usage_of, worst, zoom_of
from semkv.evaluation.talking import Feed, Talk
from semkv.evaluation.tasks.base import Task, WrittenTask

STOP_TOKENS = 16
"""A stop string is looked for in as many of the last tokens."""


@dataclass
class Tally:
    """What a variant did on the questions of one context, as it adds up to a row."""

    answers: list[Answer] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    compress_us: float = 0.0
    usage: Usage | None = None
    zoom: Zoom | None = None
    mass: Mass | None = None

    def add(self, other: Tally) -> None:
        """Add what was measured on another question."""
        self.answers += other.answers
        self.step_us += other.step_us
        self.usage = self.usage if other.usage is None else worst(self.usage, other.usage)
        self.zoom, self.mass = add_zooms(self.zoom, other.zoom), add_masses(self.mass, other.mass)

    def row(self, cell: str, index: int, commit: str, prompt_tokens: int) -> Row:
        """The finished row."""
        assert self.usage is not None
        return Row(
            cell=cell,
            context=index,
            commit=commit,
            answers=self.answers,
            usage=self.usage,
            step_us=self.step_us,
            compress_us=self.compress_us,
            zoom=self.zoom,
            mass=self.mass,
            prompt_tokens=prompt_tokens,
        )


@dataclass(frozen=True)
class Answering:
    """Puts a task's questions to states."""

    tokenizer: Any
    task: Task

    def answer(
        self,
        compiled: Any,
        state: Any,
        ids: tuple[int, ...],
        question: Question,
        tally: Tally,
        told: Told | None = None,
        watch: MassWatch | None = None,
    ) -> Talk[Told | None]:
        """Read `ids`, then measure `question` as its task says; the state of `compiled` is used up.

        Without `ids` the state's own logits give the first token, as the prefill read the question. told: what the full cache said, to
        compare with. watch: sees what the state reads. Returns what this memory said where it was not compared itself; None where answers
        are only right or wrong.
        """
        if watch is not None:
            state.watch = watch
        logits = (yield Feed(state, ids)).logits if ids else state.logits[-1]
        comparison, said = None if told is None else Comparison(told), None
        if self.task.kind == "exact":
            found = yield from self._exact(state, logits, question, tally)
        elif self.task.kind == "likelihood":
            found, said = yield from self._likelihood(state, logits, question, tally, comparison)
        else:
            assert isinstance(self.task, WrittenTask)
            written: list[int] = []
            if comparison is not None:
                state, logits, written = yield from self._read_again(state, logits, comparison, tally)
            found, said = yield from self._generated(self.task, compiled, state, logits, question, tally, written)
        if comparison is not None and comparison.places:
            compared = {"kl": round(comparison.kl, 6), "agreed": comparison.agreed, "compared": comparison.places}
            found = found.model_copy(update=compared)
        tally.answers.append(found)
        tally.usage = worst(tally.usage, usage_of(state))
        tally.zoom = add_zooms(tally.zoom, zoom_of(state))
        tally.mass = add_masses(tally.mass, None if watch is None else watch.mass())
        return None if comparison is not None else said

    def _step(self, state: Any, token: int, tally: Tally) -> Talk[Tensor]:
        """One decode step, timed; logits after it [vocab]."""
        logits, elapsed = yield Feed(state, (token,))
        tally.step_us.append(elapsed)
        return logits

    def _exact(self, state: Any, logits: Tensor, question: Question, tally: Tally) -> Talk[Answer]:
        """Greedy continuation against the answer, token by token until one differs."""
        matched = 0
        for place, expected in enumerate(question.answer):
            token = int(logits.argmax())
            matched += token == expected
            last = place + 1 == len(question.answer)
            if last or (token != expected and place > 0):
                break
            # One step is taken even after a wrong first token, so that step times do not depend on being right.
            logits = yield from self._step(state, token, tally)
            if token != expected:
                break
        return Answer(
            depth=question.depth,
            correct=matched == len(question.answer),
            matched=matched,
            expected=len(question.answer),
        )

    def _read_again(
        self, state: Any, logits: Tensor, comparison: Comparison, tally: Tally
    ) -> Talk[tuple[Any, Tensor, list[int]]]:
        """Feed the full cache's answer to `state`; where the memory would first write another token, or at the last one: state, logits and
        the tokens up to there, from which its own answer goes on."""
        tokens, own = comparison.told.tokens, None
        for place, token in enumerate(tokens):
            same, last = comparison.hear(logits), place + 1 == len(tokens)
            if own is None and (last or not same):
                own = (state if last else state.fork()), logits, list(tokens[:place])
            if not last:
                logits = yield from self._step(state, token, tally)
        assert own is not None
        return own

    def _generated(
        self,
        task: WrittenTask,
        compiled: Any,
        state: Any,
        logits: Tensor,
        question: Question,
        tally: Tally,
        written: list[int],
    ) -> Talk[tuple[Answer, Told]]:
        """Greedy text, from `written` on, until it ends, has `new_tokens`, meets a stop string, or can no longer gain."""
        ends, heard = end_tokens(compiled, self.tokenizer), [logits]
        ended: tuple[int, ...] = ()
        while True:
            token = int(logits.argmax())
            if token in ends:
                ended = (token,)
                break
            written.append(token)
            if len(written) == question.new_tokens or self._finished(task, written, question):
                break
            logits = yield from self._step(state, token, tally)
            heard.append(logits)
        text = self._text(written)
        for mark in task.stop:
            text = text.split(mark, 1)[0]
        score = task.score(text, question)
        answer = Answer(depth=question.depth, correct=score == 1.0, matched=0, expected=0, score=score, text=text)
        return answer, Told((*written, *ended), tuple(heard))

    def _finished(self, task: WrittenTask, written: list[int], question: Question) -> bool:
        if task.stop:
            recent = self._text(written[-STOP_TOKENS:])
            if any(mark in recent for mark in task.stop):
                return True
        return task.monotone and task.score(self._text(written), question) == 1.0

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _likelihood(
        self, state: Any, logits: Tensor, question: Question, tally: Tally, comparison: Comparison | None
    ) -> Talk[tuple[Answer, Told]]:
        """Log-likelihood of the answer's tokens, each after those before it as they are written."""
        token_nats, matched, heard = [], 0, []
        for place, token in enumerate(question.answer):
            heard.append(logits)
            if comparison is not None:
                comparison.hear(logits)
            token_nats.append(-float(logits.double().log_softmax(-1)[token]))
            matched += int(logits.argmax()) == token
            if place + 1 < len(question.answer):
                logits = yield from self._step(state, token, tally)
        expected, nats = len(question.answer), math.fsum(token_nats)
        answer = Answer(
            depth=question.depth,
            correct=matched == expected,
            matched=matched,
            expected=expected,
            score=math.exp(-nats / expected),
            nats=nats,
            token_nats=[round(x, 5) for x in token_nats],
        )
        return answer, Told(question.answer, tuple(heard))


def end_tokens(compiled: Any, tokenizer: Any) -> set[int]:
    """Ids that end a text, by the model's generation settings and its tokenizer."""
    settings = getattr(compiled, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    ends = set(found) if isinstance(found, (list, tuple)) else {found}
    return {int(token) for token in (*ends, tokenizer.eos_token_id) if token is not None}
