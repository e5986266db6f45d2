"""Divide a prompt at fixed places: pages of equal size, down to single tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.segments import Segmentation


@dataclass(frozen=True)
class Frame:
    """What is exact around the folded middle of a prompt: first tokens and a recent window, within a room.

    sinks: first tokens. window: recent tokens, at most `share` of the room. fold_chunk: tokens that leave the window at once.
    """

    sinks: int = 4
    window: int = 64
    share: float = 1 / 3
    fold_chunk: int = 8

    def fit(self, n: int, room: float, page_size: int) -> tuple[int, int, float]:
        """(tokens kept at the start, first token of the window, room that is left) for n tokens."""
        return self._around(n, room, page_size, self._window(room, page_size))

    def fit_shorter(self, n: int, room: float, page_size: int) -> tuple[int, int, float]:
        """`fit` with a window that gives back up to a page: what is left then grows steadily with the room, though windows are whole
        pages."""
        window = max(page_size, self._window(room, page_size) - page_size)
        return self._around(n, room, page_size, window, max(window, min(self.window, room * self.share) - page_size))

    def _window(self, room: float, page_size: int) -> int:
        return max(page_size, min(self.window, int(room * self.share) // page_size * page_size))

    def _around(
        self, n: int, room: float, page_size: int, window: int, counted: float | None = None
    ) -> tuple[int, int, float]:
        recent = n - min(window, n)
        first = min(self.sinks, recent)
        counted = window if counted is None else counted
        left = max(0.0, room - counted - self.fold_chunk - -(-first // page_size) * page_size)
        return first, recent, left


DEFAULT_FRAME = Frame()


class Framed:
    """A segmenter of what lies within a frame, knowing neither keys nor surprisal unless it says so."""

    frame: Frame
    per_store: ClassVar[bool] = False
    reads_surprisal: ClassVar[bool] = False

    @property
    def sinks(self) -> int:
        """First tokens that stay exact."""
        return self.frame.sinks


@dataclass(frozen=True)
class Pages(Framed):
    """Pages of `size` tokens between the first tokens and the window.

    Where the index of that many pages does not fit, the window gives back a page of memory, and where that is not enough pages
    double in size: what a page holds never grows with the room, as it would where the window takes a page that the index
    needs. With `fixed` pages keep their size, the window gives way down to one page, and after that the oldest tokens are left out.
    """

    size: int = 16
    frame: Frame = DEFAULT_FRAME
    fixed: bool = False

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        first, recent, left = self.frame.fit(record.tokens, room, page_size)
        if self.fixed:
            # One page of memory beside the codes, as what a question brings has to go somewhere before the cap grows.
            missing = math.ceil((recent - first) / self.size) * unit_cost + page_size - left
            spare = (record.tokens - recent) // page_size - 1
            saved = page_size - unit_cost * page_size / self.size  # tokens that leave the window are indexed themselves
            if missing > 0 and spare > 0 and saved > 0:
                pages = min(spare, math.ceil(missing / saved))
                recent, left = recent + pages * page_size, left + pages * page_size

        def most(left: float) -> int:
            return max(1, int(left / unit_cost)) if unit_cost > 0 else record.tokens

        size, start = self.size, first
        if self.fixed:
            start = max(first, recent - most(left) * size)
        else:
            _, later, more = self.frame.fit_shorter(record.tokens, room, page_size)
            size, recent = next(
                (larger, end)
                for larger in (size << doublings for doublings in itertools.count())
                for end, free in ((recent, left), (later, more))
                if -(-(end - first) // larger) <= most(free)
            )
        lengths = page_lengths(recent - start, size)
        starts = start + lengths.cumsum(0) - lengths
        return Segmentation(torch.arange(first, dtype=torch.int64, device="cpu"), starts, lengths, recent)

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        return Segmentation.of_lengths(page_lengths(len(ids), self.size))


def page_lengths(tokens: int, size: int) -> Tensor:
    """Lengths int64 of the pages of `tokens` tokens: all of `size` but the last."""
    lengths = torch.full((-(-tokens // size),), size, dtype=torch.int64, device="cpu")
    if tokens % size:
        lengths[-1] = tokens % size
    return lengths
