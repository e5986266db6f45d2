"""Slots of a workspace in PyTorch: what is not wanted any more leaves, what is missing takes the free places."""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = torch.iinfo(torch.int32).max
"""Position of a slot that holds nothing: after every query, so that the causal rule hides it."""


def release_slots_reference(
    wanted: Tensor, held: Tensor, length: Tensor, segment: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Empty, in place, the slots of the segments that are not wanted.

    wanted, held bool [H, S]: segments that each head is to hold and holds, whole; length int64 [S], tokens of each. segment,
    tokens int64 [H, slots]: which segment's and which token a slot holds, -1 and -1 where none; positions int32 [H, slots] on any
    device, `EMPTY` where none.

    Returns int64 [H] each: slots that stay full, and tokens of wanted segments that are not held.
    """
    if segment.shape[1] and held.shape[1]:
        gone = held & ~wanted
        at = (gone.gather(1, segment.clamp(min=0)) & (segment >= 0)).flatten().nonzero()[:, 0]
        for stored, empty in ((tokens, -1), (segment, -1), (positions, EMPTY)):
            stored.view(-1).index_fill_(0, at.to(stored.device), empty)
    return (segment >= 0).sum(1), ((wanted & ~held) * length).sum(1)


def assign_slots_reference(
    wanted: Tensor, held: Tensor, length: Tensor, start: Tensor, segment: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Give, in place, each token of the wanted segments that are not held its head's first free slot, in the order of segments.

    start int64 [S]: where the first token of a segment waits on the host, the others behind it. There must be free slots.

    Returns int64 [n] each: places among the slots of all heads that were filled, and their heads.
    """
    heads, missing = torch.nonzero(wanted & ~held, as_tuple=True)
    lengths = length[missing]
    ends = lengths.cumsum(0)
    places = (start[missing] - ends + lengths).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))
    heads, missing = heads.repeat_interleave(lengths), missing.repeat_interleave(lengths)
    free = segment < 0
    room, counts = free.sum(1), heads.bincount(minlength=len(wanted))
    nth = torch.arange(len(heads)) + (room.cumsum(0) - room - counts.cumsum(0) + counts)[heads]
    at = free.flatten().nonzero()[:, 0][nth]
    tokens.view(-1)[at] = places
    segment.view(-1)[at] = missing
    return at, heads


def extent_reference(segment: Tensor) -> int:
    """One more than the last slot that any head uses, of segment int64 [H, slots]."""
    used = (segment >= 0).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
