"""Divide a prompt into spans: where the text surprises, or in equal chunks."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv.errors import BudgetError
from semkv.ir.site import AttentionSite
from semkv.runtime.record import RowRecord
from semkv.runtime.segments import Segmentation


class BySurprisal(ABC):
    """Segmenters that look at the text's surprisal alone: layers with the same room share a division."""

    per_store: ClassVar[bool] = False
    reads_surprisal: ClassVar[bool] = True

    @abstractmethod
    def divide(self, surprisal: Tensor, room: float, span_cost: float, page_size: int) -> Segmentation:
        """Divide n tokens of surprisal [n] (nats) so that all fixed parts take at most `room` tokens per KV head, where a
        span's summary costs `span_cost` tokens."""

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
        """One span of the tokens that leave the window together; spans merge when the budget asks for it."""
        return Segmentation.of_lengths(torch.tensor([len(surprisal)], dtype=torch.int64, device="cpu"))


@dataclass(frozen=True)
class SurprisalSpans(BySurprisal):
    """Entropy-guided spans within a budget (SeKV Sec. 3.1).

    Boundaries lie where surprisal exceeds mean + alpha * std, the strongest first. The budget decides how many spans there
    may be: each costs its summary, so `alpha` is a lower bound on the threshold, spans are at most `max_span` tokens where
    there is room, and only the strongest boundaries are kept exact as anchors.

    Attributes
    ----------
    alpha: standard deviations above the mean from which a token is a natural boundary.
    min_span: boundaries nearer than this to another are passed over, tokens.
    max_span: longer spans are split at their most surprising token, tokens.
    anchor_share: part of the room left after the window that anchors may take, in [0, 1).
    window: recent tokens kept exact; at most `window_share` of the room.
    sinks: first tokens of the prompt, kept exact.
    fold_chunk: generated tokens that are folded at once.
    entropy: False divides into equal chunks (ablation).
    """

    alpha: float = 1.0
    min_span: int = 4
    max_span: int = 16
    anchor_share: float = 0.1
    window: int = 512
    window_share: float = 1 / 6
    sinks: int = 4
    fold_chunk: int = 8
    entropy: bool = True

    def divide(self, surprisal: Tensor, room: float, span_cost: float, page_size: int) -> Segmentation:
        n = len(surprisal)
        window = max(page_size, min(self.window, int(room * self.window_share) // page_size * page_size))
        recent = n - min(window, n)
        first = min(self.sinks, recent)
        left = max(0.0, room - window - self.fold_chunk - -(-first // page_size) * page_size)
        region = recent - first
        if region <= 0:
            return Segmentation(
                torch.arange(first, dtype=torch.int64, device="cpu"),
                torch.empty(0, dtype=torch.int64, device="cpu"),
                torch.empty(0, dtype=torch.int64, device="cpu"),
                recent,
            )
        anchors = int(self.anchor_share * left) // page_size * page_size
        most = int((left - anchors) / span_cost) if span_cost > 0 else region
        most = max(1, min(most, region // max(1, self.min_span)))
        cuts = (
            self._cuts(surprisal[first:recent], most)
            if self.entropy
            else _equal_cuts(region, self._equal(region, most))
        )
        inner = cuts[1:]
        if self.entropy:
            chosen = sorted(inner, key=lambda at: -float(surprisal[first + at]))[:anchors]
        else:
            chosen = inner[:: max(1, len(inner) // max(1, anchors))][:anchors]
        return _assemble(first, recent, cuts, set(chosen))

    def _equal(self, region: int, most: int) -> int:
        return min(most, max(1, -(-region // self.max_span), region // max(1, self.max_span)))

    def _cuts(self, surprisal: Tensor, most: int) -> list[int]:
        """First tokens of at most `most` spans, ascending, beginning with 0."""
        values = surprisal.tolist()
        n = len(values)
        threshold = float(surprisal.mean() + self.alpha * surprisal.std(unbiased=False))
        blocked = bytearray(n)
        cuts = [0]

        def block(at: int) -> None:
            low, high = max(0, at - self.min_span + 1), min(n, at + self.min_span)
            blocked[low:high] = b"\x01" * (high - low)

        block(0)
        for at in torch.argsort(surprisal, descending=True, stable=True).tolist():
            if len(cuts) >= max(1, most * 3 // 5) or values[at] <= threshold:
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
        return sorted(cuts)


@dataclass(frozen=True)
class LiteralSpans(BySurprisal):
    """SeKV Sec. 3.1 to the letter: every token above mean + alpha * std is an anchor, spans shorter than `min_span` stay exact.

    On ordinary text that holds more than a tenth of the tokens exact at any length; where it does not fit, `BudgetError`.
    """

    alpha: float = 1.0
    min_span: int = 16
    window: int = 512
    fold_chunk: int = 8

    def divide(self, surprisal: Tensor, room: float, span_cost: float, page_size: int) -> Segmentation:
        n = len(surprisal)
        recent = max(0, n - self.window)
        head = surprisal[:recent]
        boundary = head > surprisal.mean() + self.alpha * surprisal.std(unbiased=False)
        at = torch.nonzero(boundary)[:, 0]
        edges = torch.cat(
            [
                torch.tensor([-1], dtype=torch.int64, device="cpu"),
                at,
                torch.tensor([recent], dtype=torch.int64, device="cpu"),
            ]
        )
        starts, lengths = edges[:-1] + 1, edges[1:] - edges[:-1] - 1
        folded = lengths >= self.min_span
        exact = torch.ones(recent, dtype=torch.bool, device="cpu")
        for start, length in zip(starts[folded].tolist(), lengths[folded].tolist()):
            exact[start : start + length] = False
        kept = torch.nonzero(exact)[:, 0]
        need = len(kept) + (n - recent) + float(folded.sum()) * span_cost + 2 * page_size
        if need > room:
            raise BudgetError(
                f"the literal constants (alpha {self.alpha}, spans of {self.min_span}+, window {self.window}) hold {len(kept)} anchors "
                f"and short spans of {n} tokens: {need:.0f} tokens per KV head, and the budget has {room:.0f} for fixed parts; "
                "raise the budget or leave literal=False"
            )
        return Segmentation(kept, starts[folded], lengths[folded], recent)


def _equal_cuts(n: int, count: int) -> list[int]:
    return sorted({n * place // count for place in range(count)})


def _assemble(first: int, recent: int, cuts: list[int], anchors: set[int]) -> Segmentation:
    starts, lengths, kept = [], [], list(range(first))
    ends = [*cuts[1:], recent - first]
    for start, end in zip(cuts, ends):
        begin = start + 1 if start in anchors else start
        if start in anchors:
            kept.append(first + start)
        if end > begin:
            starts.append(first + begin)
            lengths.append(end - begin)
    return Segmentation(
        torch.tensor(kept, dtype=torch.int64, device="cpu"),
        torch.tensor(starts, dtype=torch.int64, device="cpu"),
        torch.tensor(lengths, dtype=torch.int64, device="cpu"),
        recent,
    )
