"""Where the values of a segment lie while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from semkv.kernels.segments.instructions import Base, Instructions, Operand

ALIGNMENT = 16
"""Numbers: what is read at once begins at a multiple of them."""


def scratch_offsets(made: Instructions, elsewhere: Container[Base]) -> tuple[list[int], int]:
    """The first number of each buffer, and how many there are in all.

    A buffer whose last reader has run gives its place to the next one of its size. Those that are `elsewhere` need no place.
    """

    def own(x: Operand) -> int | None:
        inside = x.base is not None and x.base.kind == "scratch" and x.base not in elsewhere
        return x.base.number if inside else None

    last = {own(x): number for number, step in enumerate(made.steps) for x in (step.out, *step.operands)}
    offsets, total = [0] * len(made.scratch), 0
    free: dict[int, list[int]] = defaultdict(list)
    begun: set[int] = set()
    for number, step in enumerate(made.steps):
        buffer = own(step.out)
        if buffer is not None and buffer not in begun:
            begun.add(buffer)
            size = made.scratch[buffer]
            if free[size]:
                offsets[buffer] = free[size].pop()
            else:
                offsets[buffer], total = total, total + -(-size // ALIGNMENT) * ALIGNMENT
        for gone in {own(x) for x in (step.out, *step.operands)} - {None}:
            if last[gone] == number:
                free[made.scratch[gone]].append(offsets[gone])
    return offsets, total
