"""Small chunks found by their landmarks; chunks that no landmark describes stay exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.options import CountOrNone, IndexBits, Share, Tokens, TokensOrNone
from semkv.methods.page_routers import MeanKeyRouter
from semkv.methods.pages import Frame, Pages
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.segments import Segmentation, over_runs


@dataclass(frozen=True)
class OutlierPages:
    """Pages of which the worst described stay exact: those with the smallest cosine between a key and the page's mean.

    The smallest over the tokens and KV heads of a page counts (ShadowKV Sec. 4.1). outliers: pages that stay exact, at most
    a quarter of the room.
    """

    pages: Pages
    outliers: int = 48

    per_store: ClassVar[bool] = True
    reads_surprisal: ClassVar[bool] = False

    @property
    def sinks(self) -> int:
        """First tokens that stay exact."""
        return self.pages.sinks

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        kept = min(self.outliers, int(room / 4) // self.pages.size)
        left = room - -(-kept * self.pages.size // page_size) * page_size
        parts = self.pages.segment(record, store, left, unit_cost, page_size)
        if not kept or len(parts.starts) < 2:
            return parts
        kept = min(kept * self.pages.size // int(parts.lengths.max()), len(parts.starts) - 1)  # pages may have doubled
        if not kept:
            return parts
        k = record.keys[store.store][store.first_head : store.first_head + store.kv_heads]
        cosines = page_cosines(k, parts)
        if store.among is not None:
            cosines = store.among.ranks.reduce(cosines, "min")
        worst = cosines.argsort(stable=True)[:kept]
        exact = torch.zeros(len(parts.starts), dtype=torch.bool, device="cpu")
        exact[worst] = True
        tokens = parts.folded[exact.repeat_interleave(parts.lengths)]
        return replace(
            parts, kept=torch.cat([parts.kept, tokens]), starts=parts.starts[~exact], lengths=parts.lengths[~exact]
        )

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        return self.pages.segment_more(ids, surprisal, k)


def page_cosines(k: Tensor, parts: Segmentation) -> Tensor:
    """The smallest cosine between a key and its page's mean key, over tokens and heads: k [Hkv, n, D] -> [pages], on the host."""
    keys = k[:, parts.folded.to(k.device)].float()
    mean = over_runs(keys, parts.lengths, "sum").repeat_interleave(parts.lengths.to(k.device), dim=1)
    cosine = torch.nn.functional.cosine_similarity(keys, mean, dim=-1).amin(0)
    return over_runs(cosine[None, :, None], parts.lengths, "min").flatten().cpu()


@dataclass(frozen=True)
class ShadowKV(Method):
    """ShadowKV (Sun et al., 2024): chunks of 8 tokens on the host, found by the mean of their keys, outlier chunks exact.

    The paper keeps keys on the device as factors of rank 160 before their rotation and fetches values only. Those factors
    alone take about a tenth of the full KV, so that no smaller budget could hold them: here keys wait with the values.

    chunk: tokens. outliers: chunks that stay exact, at most a quarter of the fixed parts. bits: of landmarks, 4, 8 or 16.
    sinks, window: exact tokens at the start and the end. fixed_share: of the budget, for all but unfolded chunks.
    """

    chunk: Tokens = 8
    outliers: CountOrNone = 48
    bits: IndexBits = 4
    sinks: TokensOrNone = 4
    window: Tokens = 32
    fixed_share: Share = 2 / 3

    name: ClassVar[str] = "shadowkv"
    minimum_tokens: ClassVar[int] = 48

    def components(self, program: Program, profile: Profile | None) -> Components:
        frame = Frame(self.sinks, self.window, fold_chunk=max(8, self.chunk))
        return Components(
            segmenter=OutlierPages(Pages(self.chunk, frame), self.outliers),
            router=MeanKeyRouter(self.bits),
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=40,
            window=self.window,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
            unit=self.chunk,
        )
