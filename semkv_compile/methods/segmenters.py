"""Divide a text into spans where it surprises, within a budget."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.segments import Boundary, Segmentation


@dataclass(frozen=True)
class BySurprisal(ABC):
    """Segmenters that look at the text's surprisal alone: layers with the same room share a division.

    Attributes
    ----------
    alpha: standard deviations above the mean from which a token is a natural boundary (Sec. 3.1); what follows is a lower bound on
        what the budget affords.
    window: recent tokens kept exact; at most `window_share` of the room.
    sinks: first tokens of the prompt, kept exact.
    fold_chunk: tokens that leave the window at once.
    entropy: False divides into chunks of equal size, as many as there would be spans, with as many exact tokens (ablation).
    """

    alpha: float = 1.0
    min_span: int = 4
    max_span: int = 16
    window: int = 512
    window_share: float = 1 / 6
    sinks: int = 4
    fold_chunk: int = 8
    entropy: bool = True

    per_store: ClassVar[bool] = False
    reads_surprisal: ClassVar[bool] = True

    def divide(self, surprisal: Tensor, room: float, span_cost: float, page_size: int) -> Segmentation:
        """Divide n tokens of surprisal [n] (nats) so that all fixed parts take at most `room` tokens per KV head, where a
        span's summary costs `span_cost` tokens."""
        n = len(surprisal)
        window = self.window_tokens(room, page_size)
        recent = n - min(window, n)
        first = min(self.sinks, recent)
        if recent == first:
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            sinks = torch.arange(first, dtype=torch.int64, device="cpu")
            return Segmentation(sinks, none, none, recent, boundary=self.natural(surprisal))
        left = max(0.0, room - window - self.fold_chunk - -(-first // page_size) * page_size)
        made = self.within(surprisal, first, recent, left, span_cost, page_size)
        return made if self.entropy else evenly(made, first)

    @abstractmethod
    def within(
        self, surprisal: Tensor, first: int, recent: int, left: float, span_cost: float, page_size: int
    ) -> Segmentation:
        """Divide tokens [first, recent), of which those kept exact and the summaries take at most `left` tokens."""

    @abstractmethod
    def cut(self, surprisal: Tensor, boundary: Boundary, open_tokens: int, places: int) -> tuple[Segmentation, bool]:
        """See `semkv.runtime.components.Cutting`."""

    @abstractmethod
    def places(self, room: float, kept: int, summaries: float, page_size: int) -> int:
        """See `semkv.runtime.components.Cutting`."""

    def natural(self, surprisal: Tensor) -> Boundary:
        """mean + alpha * std of the sequence (Sec. 3.1)."""
        return Boundary.at(surprisal, self.alpha)

    def window_tokens(self, room: float, page_size: int) -> int:
        """Tokens of the recent window where all fixed parts have `room`."""
        return max(page_size, min(self.window, int(room * self.window_share) // page_size * page_size))

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        surprisal = (
            torch.zeros(record.tokens, dtype=torch.float32, device="cpu")
            if record.surprisal is None
            else record.surprisal
        )
        return self.divide(surprisal, room, unit_cost, page_size)

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        """Of tokens whose predecessors are unknown: by their own surprisal, none of them exact."""
        return self.cut(surprisal, self.natural(surprisal), 0, 0)[0]


@dataclass(frozen=True)
class SurprisalSpans(BySurprisal):
    """Entropy-guided spans of even size within a budget (after SeKV Sec. 3.1).

    Boundaries lie where surprisal exceeds mean + alpha * std, the strongest first. The budget decides how many spans there
    may be: each costs its summary, so `alpha` is a lower bound on the threshold, spans are at most `max_span` tokens where
    there is room, and only the strongest boundaries are kept exact as anchors.

    Attributes
    ----------
    min_span: boundaries nearer than this to another are passed over, tokens.
    max_span: longer spans are split at their most surprising token, tokens.
    anchor_share: part of the room left after the window that anchors may take, in [0, 1).
    """

    anchor_share: float = 0.1

    def within(
        self, surprisal: Tensor, first: int, recent: int, left: float, span_cost: float, page_size: int
    ) -> Segmentation:
        region = recent - first
        anchors = self._anchors(left, page_size)
        most = int((left - anchors) / span_cost) if span_cost > 0 else region
        most = max(1, min(most, region // max(1, self.min_span)))
        cuts, boundary = self._cuts(surprisal[first:recent], most)
        chosen = sorted(cuts[1:], key=lambda at: -float(surprisal[first + at]))[:anchors]
        return _assemble(first, recent, cuts, set(chosen), boundary)

    def _anchors(self, left: float, page_size: int) -> int:
        return int(self.anchor_share * left) // page_size * page_size

    def places(self, room: float, kept: int, summaries: float, page_size: int) -> int:
        left = max(
            0.0,
            room - self.window_tokens(room, page_size) - self.fold_chunk - -(-self.sinks // page_size) * page_size,
        )
        return max(0, self._anchors(left, page_size) + self.sinks - kept)

    def cut(self, surprisal: Tensor, boundary: Boundary, open_tokens: int, places: int) -> tuple[Segmentation, bool]:
        """A span ends before a token that surprises, where it has `min_span` tokens, and where it has `max_span`."""
        pieces = Pieces(places)
        begin, size = 0, open_tokens  # of the span under way, whose first tokens may be folded already
        goes_on = open_tokens > 0
        for at, value in enumerate(surprisal.tolist()):
            surprising = value >= boundary.nats and size >= self.min_span
            if surprising or size >= self.max_span:
                goes_on = goes_on and at > 0
                pieces.fold(begin, at)
                kept = surprising and self.anchor_share > 0 and pieces.keep(at, at + 1)
                begin, size = at + kept, 0
            size += begin <= at
        pieces.fold(begin, len(surprisal))
        return pieces.division(len(surprisal)), goes_on

    def _cuts(self, surprisal: Tensor, most: int) -> tuple[list[int], Boundary]:
        """First tokens of at most `most` spans, ascending, beginning with 0; and from where on surprisal begins one."""
        values, n = surprisal.tolist(), len(surprisal)
        boundary = natural = self.natural(surprisal)
        blocked = bytearray(n)
        cuts = [0]

        def block(at: int) -> None:
            low, high = max(0, at - self.min_span + 1), min(n, at + self.min_span)
            blocked[low:high] = b"\x01" * (high - low)

        block(0)
        for at in torch.argsort(surprisal, descending=True, stable=True).tolist():
            if len(cuts) >= max(1, most * 3 // 5):
                boundary = natural if values[at] < natural.nats else Boundary.of(surprisal, values[at])
                break
            if values[at] < natural.nats:
                break
            if not blocked[at] and n - at >= self.min_span:
                cuts.append(at)
                block(at)
        cuts.sort()
        ends = [*cuts[1:], n]
        heap = [(-(end - start), start) for start, end in zip(cuts, ends)]
        heapq.heapify(heap)
        while len(cuts) < most and heap:
            size, start = heapq.heappop(heap)
            if -size <= self.max_span and len(cuts) >= 1:
                break
            low, high = start + self.min_span, start - size - self.min_span
            if high < low:
                continue
            at = max(range(low, high + 1), key=lambda place: (values[place], -abs(2 * place - 2 * start + size)))
            cuts.append(at)
            heapq.heappush(heap, (-(at - start), start))
            heapq.heappush(heap, (-(start - size - at), at))
        return sorted(cuts), boundary


class Pieces:
    """Tokens of a chunk as they are divided, in order: kept exact, as far as there are `places`, or folded."""

    def __init__(self, places: int) -> None:
        self.room = places
        self.kept: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []

    def keep(self, begin: int, end: int) -> bool:
        """Keep tokens [begin, end) exact, if there are places for all of them."""
        if end - begin > self.room - len(self.kept):
            return False
        self.kept += range(begin, end)
        return True

    def fold(self, begin: int, end: int) -> None:
        """Fold tokens [begin, end) as one span; nothing where there are none."""
        if end > begin:
            self.starts.append(begin)
            self.lengths.append(end - begin)

    def division(self, taken: int) -> Segmentation:
        return division_of(self.kept, self.starts, self.lengths, taken)


def evenly(made: Segmentation, first: int) -> Segmentation:
    """As many spans and exact tokens as `made` has behind its `first` sinks, all of the same size but for one token."""
    spans, kept = len(made.lengths), len(made.kept) - first
    region = made.recent - first
    if not spans:
        return made
    exact, starts, lengths = list(range(first)), [], []
    for number in range(spans):
        begin, end = (first + region * place // spans for place in (number, number + 1))
        own = kept * (number + 1) // spans - kept * number // spans
        own = min(own, end - begin - 1)
        exact += range(begin, begin + own)
        starts.append(begin + own)
        lengths.append(end - begin - own)
    return division_of(exact, starts, lengths, made.recent, Boundary(math.inf, math.inf))


def division_of(
    kept: list[int], starts: list[int], lengths: list[int], recent: int, boundary: Boundary | None = None
) -> Segmentation:
    at, begin, size = (torch.tensor(x, dtype=torch.int64, device="cpu") for x in (kept, starts, lengths))
    return Segmentation(at, begin, size, recent, boundary=boundary)


def _assemble(first: int, recent: int, cuts: list[int], anchors: set[int], boundary: Boundary) -> Segmentation:
    starts, lengths, kept = [], [], list(range(first))
    ends = [*cuts[1:], recent - first]
    for start, end in zip(cuts, ends):
        begin = start + 1 if start in anchors else start
        if start in anchors:
            kept.append(first + start)
        if end > begin:
            starts.append(first + begin)
            lengths.append(end - begin)
    return division_of(kept, starts, lengths, recent, boundary)
