"""Pages chosen by an upper bound of what the query can find in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.methods.options import IndexBits, Share, Tokens, TokensOrNone
from semkv.methods.page_routers import MinMaxRouter
from semkv.methods.pages import Frame, Pages
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components


@dataclass(frozen=True)
class Quest(Method):
    """Quest (Tang et al., 2024): pages with the smallest and largest key per channel, from which a query's best pages follow.

    Query heads of a group share their pages, which one KV head holds once. The paper leaves everything on the device and the
    first two layers whole; here pages wait on the host, and every layer keeps the budget.

    page: tokens. bits: of the bounds, 4, 8, or 16 as in the paper, where a page's bounds cost as much as a token. sinks,
    window: exact tokens at the start and the end. fixed_share: of the budget, for all but unfolded pages.
    """

    page: Tokens = 16
    bits: IndexBits = 8
    sinks: TokensOrNone = 4
    window: Tokens = 64
    fixed_share: Share = 1 / 2

    name: ClassVar[str] = "quest"
    minimum_tokens: ClassVar[int] = 40

    def components(self, program: Program, profile: Profile | None) -> Components:
        frame = Frame(self.sinks, self.window, fold_chunk=max(8, self.page))
        return Components(
            segmenter=Pages(self.page, frame),
            router=MinMaxRouter(self.bits),
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=32,
            window=self.window,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
            unit=self.page,
        )
