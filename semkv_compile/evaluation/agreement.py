"""Agreement with the full cache, token by token: its own answer is read again over a compressed memory.

A score says whether an answer is right; this says how far the next token's distribution is from the full cache's at each token of the
full cache's answer, so that a memory that is nearly right and one that is lost by luck are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.evaluation.schema import Agreement, Interval, Row
from semkv.evaluation.statistics import proportion, ratio_estimate


@dataclass(frozen=True)
class Told:
    """What the full cache said to one question.

    tokens: of its answer, A of them, the end of the text among them where it ended by itself; of a text that goes on as written, those
    of the text. logits: before each of them, A tensors [vocab].
    """

    tokens: tuple[int, ...]
    logits: tuple[Tensor, ...]


@dataclass
class Comparison:
    """A memory's distributions beside the full cache's, one token of `told` after the other.

    kl: sum of KL(full || memory), nats, in float64. agreed: places at which both would write the same token. places: compared so far.
    """

    told: Told
    kl: float = 0.0
    agreed: int = 0
    places: int = 0

    def hear(self, logits: Tensor) -> bool:
        """Compare `logits` [vocab] with the full cache's at the next place; whether both would write the same token."""
        theirs = self.told.logits[self.places].double().log_softmax(-1)
        mine = logits.double().log_softmax(-1)
        self.kl += max(float((theirs.exp() * (theirs - mine)).sum()), 0.0)
        same = bool(torch.equal(theirs.argmax(), mine.argmax()))
        self.agreed += same
        self.places += 1
        return same


def agreement(rows: Sequence[Row], full: Sequence[Row]) -> Agreement | None:
    """Of the questions that both answered; None where no answer of `rows` was compared."""
    theirs = {row.context: row for row in full}
    found = [
        (answer, other, row.context)
        for row in rows
        if row.context in theirs
        for answer, other in zip(row.answers, theirs[row.context].answers)
        if answer.compared
    ]
    if not found:
        return None
    tokens, contexts = [answer.compared for answer, _, _ in found], [context for _, _, context in found]
    right = [(float(answer.correct), context) for answer, other, context in found if other.correct]
    return Agreement(
        kept=Interval.of(proportion(*zip(*right))) if right else None,
        kl=Interval.of(ratio_estimate([answer.kl for answer, _, _ in found], tokens, contexts)),
        top1=Interval.of(ratio_estimate([answer.agreed for answer, _, _ in found], tokens, contexts)),
        tokens=sum(tokens),
    )
