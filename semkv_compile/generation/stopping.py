"""Which rows of a running `generate` call are finished, so that their states read nothing more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList

from semkv.runtime.state import State


class FinishedRows(StoppingCriteriaList):
    """Stopping criteria that tell `state` which rows they stopped and what each row's unread last token is.

    `generate` goes on feeding padding to rows that ended before their neighbours; a state must not read it. ids: int64 [B, T], all
    that was generated so far, prompt included; None before the first token.
    """

    def __init__(self, criteria: Iterable[Any], state: State) -> None:
        super().__init__(criteria)
        self.state = state
        self.ids: Tensor | None = None
        self._last: Tensor | None = None
        self._lengths: list[int] = []

    def take(self, criteria: Iterable[Any]) -> FinishedRows:
        """Hold all of `criteria`: those that were given and those that `generate` made of its configuration."""
        self[:] = list(criteria)
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Bool [B], as `StoppingCriteriaList`; input_ids int64 [B, T] end with the tokens just chosen."""
        done = super().__call__(input_ids, scores, **kwargs)
        newest = input_ids[:, -1:]
        turn = self.state.turn
        finished = turn.finished
        if finished is None:
            finished = torch.zeros_like(done)
            self._last = newest
        self._last = torch.where(finished[:, None], self._last, newest)
        turn.finished = finished | done.to(finished.device)
        self.ids, self._lengths = input_ids, self.state.lengths
        return done

    def close(self) -> None:
        """Leave each row's last token for the next turn to read, unless an interruption came after the step that read it."""
        if self._last is None:
            return
        read = [now != then for now, then in zip(self.state.lengths, self._lengths)]
        if not any(read):
            self.state.pending = self._last.to(self.state.logits.device)
        elif not all(read):  # rows that had finished have a token to read, the others none: no next turn can begin so
            for row in self.state.rows:
                row.stepping = True


__all__ = ["FinishedRows"]
