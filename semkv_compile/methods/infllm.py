"""Blocks found by their most representative tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.methods.options import Count, IndexBits, Share, Tokens, TokensOrNone
from semkv.methods.page_routers import RepresentativeRouter
from semkv.methods.pages import Frame, Pages
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components


@dataclass(frozen=True)
class InfLLM(Method):
    """InfLLM (Xiao et al., 2024): blocks of the distant past on the host, looked up by a few representative keys of each.

    The paper's blocks of 128 tokens belong to windows of thousands; `block` is smaller here, so that a tenth of a short context
    holds several. Keys keep the positions at which they were computed, where the paper gives all distant tokens one position to
    go beyond the trained length.

    block: tokens. representatives: keys per block. local: following queries that say which tokens represent it. bits: of
    these keys, 4, 8 or 16. sinks, window: exact tokens at the start and the end. fixed_share: of the budget, for all but
    unfolded blocks.
    """

    block: Tokens = 32
    representatives: Count = 4
    local: Count = 32
    bits: IndexBits = 8
    sinks: TokensOrNone = 16
    window: Tokens = 128
    fixed_share: Share = 2 / 3

    name: ClassVar[str] = "infllm"
    minimum_tokens: ClassVar[int] = 96

    def components(self, program: Program, profile: Profile | None) -> Components:
        frame = Frame(self.sinks, self.window, fold_chunk=self.block)
        return Components(
            segmenter=Pages(self.block, frame),
            router=RepresentativeRouter(self.representatives, self.local, self.bits),
            outside="folded",
            unit=self.block,
            fixed_share=self.fixed_share,
            floor_tokens=64,
            window=self.window,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
            reads_queries=True,
        )
