"""SeKV's spans by its paper: every boundary an anchor, short spans exact; alpha rises as far as the budget asks."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from semkv.methods.segmenters import BySurprisal, Pieces, division_of
from semkv.runtime.store.segments import Boundary, Segmentation


@dataclass(frozen=True)
class PaperSpans(BySurprisal):
    """SeKV Sec. 3.1: tokens above mean + alpha * std are anchors, kept exact; the tokens between two of them are a span, kept exact as
    well where it has fewer than `min_span` tokens.

    On ordinary text that holds most tokens exact at alpha = 1. Where it does not fit, alpha is the lowest that fits: the most boundaries,
    strongest first, whose anchors, short spans and summaries the room affords.

    Attributes
    ----------
    min_span: L_min, the shortest folded span, tokens.
    max_span: longer spans are split, into pieces of about as many tokens, where they surprise most; the token there is no anchor. More
        where the summaries of such spans would take more than half of the room.
    anchors: False folds a boundary token with the span that it begins; boundaries are the same (ablation).
    """

    min_span: int = 16
    max_span: int = 64
    sinks: int = 1
    fold_chunk: int = 16
    anchors: bool = True

    def within(
        self, surprisal: Tensor, first: int, recent: int, left: float, span_cost: float, page_size: int
    ) -> Segmentation:
        region = surprisal[first:recent]
        n, room = recent - first, left - (page_size - 1)  # exact tokens are charged in whole pages
        affordable = max(1, int(room / 2 / span_cost)) if span_cost > 0 else n
        longest = max(self.max_span, -(-n // affordable))
        at, boundary = self._boundaries(surprisal, region, room, span_cost, longest)
        return self._assemble(region.tolist(), first, at, longest, boundary)

    def _boundaries(
        self, surprisal: Tensor, region: Tensor, room: float, span_cost: float, longest: int
    ) -> tuple[list[int], Boundary]:
        """The boundaries, ascending, and from where on: all from alpha on, or as many as fit."""
        values, n = region.tolist(), len(region)
        natural = self.natural(surprisal)

        def cost(length: int) -> float:
            return length if length < self.min_span else -(-length // longest) * span_cost

        order = [
            at for at in torch.argsort(region, descending=True, stable=True).tolist() if values[at] >= natural.nats
        ]
        placed, total, best = [-1, n], cost(n), 0
        for count, at in enumerate(order, 1):
            place = bisect_left(placed, at)
            before, behind = placed[place - 1], placed[place]
            total += 1 + cost(at - before - 1) + cost(behind - at - 1) - cost(behind - before - 1)
            placed.insert(place, at)
            last = count == len(order) or values[order[count]] < values[at]  # equal tokens are boundaries together
            if last and total <= room:
                best = count
        if best == len(order):
            return sorted(order), natural
        return sorted(order[:best]), Boundary.of(surprisal, values[order[best - 1]] if best else math.inf)

    def _assemble(
        self, values: list[float], first: int, boundaries: list[int], longest: int, boundary: Boundary
    ) -> Segmentation:
        kept, starts, lengths = list(range(first)), [], []
        edges = [-1, *boundaries, len(values)]
        for before, end in pairwise(edges):
            anchored = before >= 0 and self.anchors
            begin = before + 1 if anchored or before < 0 else before
            if anchored:
                kept.append(first + before)
            if end - before - 1 < self.min_span:
                kept += range(first + begin, first + end)
                continue
            for start, stop in self._split(values, begin, end, longest):
                starts.append(first + start)
                lengths.append(stop - start)
        return division_of(kept, starts, lengths, first + len(values), boundary)

    @staticmethod
    def _split(values: list[float], begin: int, end: int, longest: int) -> list[tuple[int, int]]:
        """The span [begin, end) in as few pieces as are of about `longest` tokens, each beginning at the most surprising token near where
        even ones would."""
        size = end - begin
        count = -(-size // longest)
        reach = size // (4 * count)
        edges = [begin]
        for number in range(1, count):
            even = begin + size * number // count
            edges.append(max(range(even - reach, even + reach + 1), key=lambda at: (values[at], -abs(at - even))))
        return list(zip(edges, [*edges[1:], end]))

    def places(self, room: float, kept: int, summaries: float, page_size: int) -> int:
        free = room - self.window_tokens(room, page_size) - self.fold_chunk - (page_size - 1) - summaries - kept
        return max(0, int(free))

    def cut(self, surprisal: Tensor, boundary: Boundary, open_tokens: int, places: int) -> tuple[Segmentation, bool]:
        """Spans between anchors as in a prompt. What follows the last anchor and may yet be short is not taken; where there are no places
        for exact tokens, they are folded."""
        pieces, n = Pieces(places), len(surprisal)
        begin, goes_on = 0, open_tokens > 0
        bounds = torch.nonzero(surprisal >= boundary.nats)[:, 0].tolist()
        for at in bounds:
            long = at - begin >= self.min_span or (at > 0 and begin == 0 and goes_on)
            if long or not pieces.keep(begin, at):
                pieces.fold(begin, at)
            goes_on = goes_on and at > 0
            begin = at + (self.anchors and pieces.keep(at, at + 1))
        if 0 < begin < n and n - begin < self.min_span:
            return pieces.division(begin), goes_on
        pieces.fold(begin, n)
        return pieces.division(n), goes_on
