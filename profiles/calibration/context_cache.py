"""Contexts that are kept between steps as far as a number of bytes reaches."""

from __future__ import annotations

from collections.abc import Callable

from .contexts import Context


class ContextCache:
    """Keeps the first contexts that fit into `limit` bytes; all others are made anew whenever they are asked for.

    Nothing is put out for another: steps go round through all contexts, so the oldest is the next to be needed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._kept: dict[tuple[int, int], Context] = {}

    def get(self, key: tuple[int, int], make: Callable[[], Context]) -> Context:
        """The context under `key`, from `make` where it is not kept."""
        if key in self._kept:
            return self._kept[key]
        made = make()
        if self.nbytes + made.nbytes <= self.limit:
            self._kept[key] = made
            self.nbytes += made.nbytes
        return made

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self.nbytes = 0
