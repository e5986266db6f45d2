"""The lowered graphs of a captured body, made once for all methods that change nothing in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule


@dataclass(frozen=True)
class Lowered:
    """Graphs that passes made of a body and a head, and their notes; they are not changed any more."""

    prefill: GraphModule | None
    extend: GraphModule | None
    decode: GraphModule | None
    head: GraphModule | None
    notes: tuple[str, ...]


class Rewritten:
    """The graphs that were made last, and what of: a program that is evolved shares them, and one with another body does not take them."""

    def __init__(self) -> None:
        self._known: tuple[GraphModule, GraphModule | None, Lowered] | None = None

    def of(self, body: GraphModule, head: GraphModule | None) -> Lowered | None:
        """What was made of these two; None where nothing was."""
        known = self._known
        return known[2] if known is not None and known[0] is body and known[1] is head else None

    def keep(self, body: GraphModule, head: GraphModule | None, made: Lowered) -> None:
        """Keep what was made of these two in the place of what there is."""
        self._known = (body, head, made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        """A copy has tensors of its own."""
        return Rewritten()


__all__ = ["Lowered", "Rewritten"]
