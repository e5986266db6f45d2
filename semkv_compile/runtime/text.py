"""The tokens that a row has read, with what is known of each: all of its layers fold by the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class Once:
    """What several layers ask for, made for the first of them."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def of(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` makes, or made before of `what`."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]


def once(shared: Once | None, what: Hashable, make: Callable[[], Made]) -> Made:
    """`shared.of(what, make)`; where nothing is shared, what `make` makes."""
    return make() if shared is None else shared.of(what, make)


class Text:
    """ids int64 [n] of any tokens and their surprisal float32 [n] in nats, 0 where no method reads it. found: what layers have found out
    about its end, until tokens are added."""

    def __init__(self, ids: Tensor, surprisal: Tensor | None = None) -> None:
        self._ids, self._surprisal = array("i", ids.tolist()), array("f", bytes(4 * len(ids)))
        self.found = Once()
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
        self.found = Once()
        self._ids.extend(ids.tolist())
        self._surprisal.extend(surprisal.tolist())

    def newest(self, tokens: int, count: int) -> tuple[Tensor, Tensor]:
        """ids int64 [count] and surprisal float32 [count] of the first `count` of the newest `tokens` tokens."""
        own = slice(len(self) - tokens, len(self) - tokens + count)
        ids = torch.tensor(self._ids[own], dtype=torch.int64, device="cpu")
        return ids, torch.tensor(self._surprisal[own], dtype=torch.float32, device="cpu")

    def clone(self) -> Text:
        copy = object.__new__(Text)
        copy.found = Once()
        copy._ids, copy._surprisal = self._ids[:], self._surprisal[:]
        return copy


__all__ = ["Once", "Text", "once"]
