"""Which tokens a layer will lack: those of the units just below the cut of its last step, or, where its choice is known, exactly those."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.runtime.largest import largest
from semkv.runtime.spans import TOKENS, FoldedSpans
from semkv.runtime.workspace import ranges

NEG_INF = float("-inf")

PLACE_BITS = 32
"""A token's head and place are one number, so that one search finds it."""


def token_keys(heads: Tensor, places: Tensor) -> Tensor:
    """int64 [n]: numbers in the order of heads, then places, int64 [n] each."""
    return heads << PLACE_BITS | places


@dataclass(frozen=True)
class Whereabouts:
    """Where the tokens of units wait, as the tables of a store's spans stood in one turn.

    Those are replaced when units change, never written in place, and a place once given keeps its token: what is read
    from them by another thread, while the store goes on, is still true.
    """

    segment_unit: Tensor
    waits_as_tokens: Tensor
    length: Tensor
    start: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, spans: FoldedSpans) -> Whereabouts:
        kinds = spans.segment_kind == TOKENS
        return cls(spans.segment_unit, kinds, spans.segment_length, spans.segment_start, spans.lengths)

    def tokens(self, units: Tensor, most: int, held: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Heads and places int64 [n], ascending, of at most `most` tokens of `units` bool [Hkv, M] that are not in segments `held`
        bool [Hkv, S]."""
        unit = self.segment_unit.expand(len(units), -1)
        wanted = units.gather(1, unit.clamp(min=0)) & (unit >= 0) & self.waits_as_tokens
        if held is not None:
            wanted &= ~torch.nn.functional.pad(held, (0, wanted.shape[1] - held.shape[1]))
        heads, segment = torch.nonzero(wanted, as_tuple=True)
        length = self.length[segment]
        heads, places = heads.repeat_interleave(length)[:most], ranges(self.start[segment], length)[:most]
        keys = token_keys(heads, places)
        if bool((keys[1:] < keys[:-1]).any()):  # units of tokens from here and there
            keys = keys.sort().values
            heads, places = keys >> PLACE_BITS, keys & ((1 << PLACE_BITS) - 1)
        return heads, places


@dataclass(frozen=True)
class Likely:
    """The units that came next in this step's order, behind those that it unfolded.

    score [Hq, M]: of the last token; chosen bool [Hkv, M]: units unfolded. most: tokens over all KV heads.
    """

    where: Whereabouts
    score: Tensor
    chosen: Tensor
    most: int

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Heads and places, as `semkv.runtime.prefetch.Wanted` says."""
        heads = len(self.chosen)
        best = self.score.unflatten(0, (heads, -1)).amax(1).masked_fill(self.chosen, NEG_INF)
        sizes, each = self.where.sizes.expand(heads, -1), self.most // heads
        least, most = int(sizes.min()), int(sizes.max())
        count = min(best.shape[1], each // max(1, least))
        if least == most:
            return self.where.tokens(largest(best, count) & (best > NEG_INF), self.most)
        highest, order = best.topk(count, dim=1)
        fits = (sizes.gather(1, order).cumsum(1) <= each) & (highest > NEG_INF)
        return self.where.tokens(torch.zeros_like(self.chosen).scatter_(1, order, fits), self.most)


@dataclass(frozen=True)
class Certain:
    """The units that a step is going to unfold, chosen bool [Hkv, M], less the segments `held` bool [Hkv, S] that are there."""

    where: Whereabouts
    chosen: Tensor
    held: Tensor
    most: int

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Heads and places, as `semkv.runtime.prefetch.Wanted` says."""
        return self.where.tokens(self.chosen, self.most, self.held)


__all__ = ["Certain", "Likely", "Whereabouts", "token_keys"]
