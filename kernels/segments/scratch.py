"""Where the buffers of a tape lie while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence

ALIGNMENT = 64
"""Bytes: buffers begin at multiples of them."""


def scratch_offsets(
    sizes: Sequence[int], uses: Sequence[Sequence[int]], elsewhere: Container[int]
) -> tuple[list[int], int]:
    """The first byte of each buffer of `sizes` bytes, and how many there are in all.

    uses: the buffers of each instruction, in order. A buffer whose last reader has run gives its place to the next one of its size; those
    that are `elsewhere` need no place.
    """
    last = [-1] * len(sizes)
    for number, own in enumerate(uses):
        for buffer in own:
            last[buffer] = number
    offsets, total = [-1] * len(sizes), 0
    free: dict[int, list[int]] = defaultdict(list)
    for number, own in enumerate(uses):
        for buffer in own:
            if offsets[buffer] >= 0 or buffer in elsewhere:
                continue
            size = -(-sizes[buffer] // ALIGNMENT) * ALIGNMENT
            places = free[size]
            if places:
                offsets[buffer] = places.pop()
            else:
                offsets[buffer], total = total, total + size
        for buffer in set(own):
            if last[buffer] == number and buffer not in elsewhere:
                free[-(-sizes[buffer] // ALIGNMENT) * ALIGNMENT].append(offsets[buffer])
    return offsets, total
