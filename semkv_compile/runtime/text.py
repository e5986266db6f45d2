"""The tokens that a row has read, with what is known of each: all of its layers fold by the same."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor


class Text:
    """ids int64 [n] of any tokens and their surprisal float32 [n] in nats, 0 where no method reads it."""

    def __init__(self, ids: Tensor, surprisal: Tensor | None = None) -> None:
        self._ids, self._surprisal = array("i", ids.tolist()), array("f", bytes(4 * len(ids)))
        if surprisal is not None:
            self._surprisal = array("f", surprisal.tolist())

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Tensor:
        """int64 [n]."""
        return torch.tensor(self._ids, dtype=torch.int64, device="cpu")

    @property
    def surprisal(self) -> Tensor:
        """float32 [n]."""
        return torch.tensor(self._surprisal, dtype=torch.float32, device="cpu")

    def add(self, ids: Tensor, surprisal: Tensor) -> None:
        """The next tokens are ids [t] of surprisal [t]."""
        self._ids.extend(ids.tolist())
        self._surprisal.extend(surprisal.tolist())

    def newest(self, tokens: int, count: int) -> tuple[Tensor, Tensor]:
        """ids int64 [count] and surprisal float32 [count] of the first `count` of the newest `tokens` tokens."""
        own = slice(len(self) - tokens, len(self) - tokens + count)
        ids = torch.tensor(self._ids[own], dtype=torch.int64, device="cpu")
        return ids, torch.tensor(self._surprisal[own], dtype=torch.float32, device="cpu")

    def clone(self) -> Text:
        copy = object.__new__(Text)
        copy._ids, copy._surprisal = self._ids[:], self._surprisal[:]
        return copy


__all__ = ["Text"]
