"""Slots of a workspace in PyTorch: what is not wanted any more leaves, what is missing takes the free places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

EMPTY = torch.iinfo(torch.int32).max
"""Position of a slot that holds nothing: after every query, so that the causal rule hides it."""


class Even(NamedTuple):
    """Segment n has `length` tokens, the first of them with position `position` + n * `length` at place `start` + n * `length`."""

    length: int
    position: int
    start: int


@dataclass(frozen=True)
class Segments:
    """Stored runs of tokens: length, position of the first token and its place in the host tier, int64 [S] each."""

    length: Tensor
    position: Tensor
    start: Tensor

    @cached_property
    def even(self) -> Even | None:
        """What tells these tables without reading them, where they are as regular as pages."""
        if not len(self.length):
            return None
        found = Even(int(self.length[0]), int(self.position[0]), int(self.start[0]))
        steps = found.length * torch.arange(len(self.length), dtype=torch.int64, device="cpu")
        lengths = bool((self.length == found.length).all()) and found.length > 0
        follow = torch.equal(self.position - found.position, steps) and torch.equal(self.start - found.start, steps)
        return found if lengths and follow else None


def release_slots_reference(
    wanted: Tensor, held: Tensor, segments: Segments, segment: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Empty, in place, the slots of the segments that are not wanted.

    wanted bool [H, S], held bool [H, K], K <= S: segments that each head is to hold and holds, whole, of the last S - K none.
    segment, tokens int64 [H, slots]: which segment's and which token a slot holds, -1 and -1 where none; positions int32 [H, slots] on any
    device, `EMPTY` where none.

    Returns int64 [H] each: slots that stay full, and tokens of wanted segments that are not held.
    """
    held = _with_all(held, wanted)
    if segment.shape[1] and held.shape[1]:
        gone = held & ~wanted
        at = (gone.gather(1, segment.clamp(min=0)) & (segment >= 0)).flatten().nonzero()[:, 0]
        for stored, empty in ((tokens, -1), (segment, -1), (positions, EMPTY)):
            stored.view(-1).index_fill_(0, at.to(stored.device), empty)
    return (segment >= 0).sum(1), ((wanted & ~held) * segments.length).sum(1)


def assign_slots_reference(
    wanted: Tensor, held: Tensor, segments: Segments, segment: Tensor, tokens: Tensor, missing: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give, in place, each token of the wanted segments that are not held its head's first free slot, in the order of segments.

    missing: as `release_slots_reference` returned it; there must be as many free slots.

    Returns int64 [n] each, of the tokens: places among the slots of all heads that were filled, their heads, where they wait; and int32
    [n], their positions.
    """
    heads, lacking = torch.nonzero(wanted & ~_with_all(held, wanted), as_tuple=True)
    lengths = segments.length[lacking]
    ends = lengths.cumsum(0)
    inside = torch.arange(int(missing.sum()), dtype=torch.int64, device="cpu") - (ends - lengths).repeat_interleave(
        lengths
    )
    heads, lacking = heads.repeat_interleave(lengths), lacking.repeat_interleave(lengths)
    free = segment < 0
    room = free.sum(1)
    nth = (
        torch.arange(len(heads), dtype=torch.int64, device="cpu")
        + (room.cumsum(0) - room - missing.cumsum(0) + missing)[heads]
    )
    at = free.flatten().nonzero()[:, 0][nth]
    places = segments.start[lacking] + inside
    tokens.view(-1)[at] = places
    segment.view(-1)[at] = lacking
    return at, heads, places, (segments.position[lacking] + inside).to(torch.int32)


def _with_all(held: Tensor, wanted: Tensor) -> Tensor:
    """`held` with a column for each segment."""
    return pad(held, (0, wanted.shape[1] - held.shape[1]))


def extent_reference(segment: Tensor) -> int:
    """One more than the last slot that any head uses, of segment int64 [H, slots]."""
    used = (segment >= 0).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
