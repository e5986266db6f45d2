"""With which weights of a model a state or a record was made."""

from __future__ import annotations

from typing import Protocol


class Weights(Protocol):
    """The weights that a model had between two changes of them."""

    def check(self, what: str) -> None:
        """Raise `StateError` where the model has others by now; `what` was made with these."""
