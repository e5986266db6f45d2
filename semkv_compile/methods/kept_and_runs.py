"""Divide a prompt by a keeper's choice: what it keeps stays exact, and the runs between are folded instead of dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.methods.pages import page_lengths
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.segments import Segmentation


class SharedKeeper(Protocol):
    """A keeper whose choice is the same for all KV heads, with scores to choose by."""

    def keep(self, site: AttentionSite, record: RowRecord, room: int, page_size: int) -> tuple[Tensor, int]:
        """As `semkv.runtime.components.Keeper`, with one row of tokens."""


@dataclass(frozen=True)
class KeptAndRuns:
    """Runs of tokens that `keeper` would drop, cut into spans of at most `longest` tokens.

    The kept tokens get what the spans' summaries leave of the room; where the summaries alone take more than half of it,
    spans get longer. fold_chunk: generated tokens that leave the window at once, one span.
    """

    keeper: SharedKeeper
    longest: int = 16
    fold_chunk: int = 8

    per_store: ClassVar[bool] = True
    reads_surprisal: ClassVar[bool] = False

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        longest = self.longest
        room -= self.fold_chunk + page_size  # tokens on their way out of the window, and a page that is not full
        while record.tokens / longest * unit_cost > room / 4:
            longest *= 2
        # A kept token may cut a run in two: each costs itself and, at worst, a summary more.
        spans = -(-record.tokens // longest) * unit_cost
        share = max(0.0, room - spans) / (1 + unit_cost)
        pages = max(2, int(share) // page_size) * page_size
        kept, recent = self.keeper.keep(store, record, pages, page_size)
        folded = torch.ones(recent, dtype=torch.bool, device="cpu")
        folded[kept[0]] = False
        edges = torch.diff(
            folded.int(),
            prepend=torch.zeros(1, dtype=torch.int32, device="cpu"),
            append=torch.zeros(1, dtype=torch.int32, device="cpu"),
        )
        begins, ends = torch.nonzero(edges == 1)[:, 0], torch.nonzero(edges == -1)[:, 0]
        lengths = [page_lengths(end - begin, longest) for begin, end in zip(begins.tolist(), ends.tolist())]
        starts = [begin + part.cumsum(0) - part for begin, part in zip(begins.tolist(), lengths)]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return Segmentation(kept[0], torch.cat([none, *starts]), torch.cat([none, *lengths]), recent)

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        return Segmentation.of_lengths(torch.tensor([len(ids)], dtype=torch.int64, device="cpu"))
