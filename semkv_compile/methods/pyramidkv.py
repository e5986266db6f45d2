"""SnapKV's votes with layer budgets that fall linearly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.ir.program import Program
from semkv.methods.base import OncePerPrompt
from semkv.methods.keepers import ObservationWindow
from semkv.methods.options import FromOne, Queries, TokensOrNone, Width
from semkv.methods.window_scores import Pool
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components


@dataclass(frozen=True)
class PyramidKV(OncePerPrompt):
    """PyramidKV (Cai et al., 2024): lower layers spread their attention and get more, higher ones focus it and get less.

    Budgets are an arithmetic sequence: with L layers of B tokens on average, the last gets B / beta and the first
    2 B - B / beta (Sec. 4.2). beta: steepness, at least 1; 1 is even. window: observing queries, 8 in the paper ("instruction
    tokens"). kernel, pool: 1-D pooling of the votes. recent: last tokens that stay exact (the paper keeps every generated
    token, `generated="kept"`; under a hard budget the oldest of these make room for them).
    """

    beta: FromOne = 20.0
    window: Queries = 8
    kernel: Width = 7
    pool: Pool = "max"
    recent: TokensOrNone = 32

    name: ClassVar[str] = "pyramidkv"
    minimum_tokens: ClassVar[int] = 24

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components(keeper=ObservationWindow(self.window, self.kernel, self.pool, self.recent))

    def layer_shares(self, program: Program, profile: Profile | None) -> tuple[float, ...]:
        """Weights that fall from 2 - 1 / beta to 1 / beta over the stores without a sliding window, in order."""
        deep = [store.store for store in program.stores if not store.window]
        last = 1 / self.beta
        fall = 2 * (1 - last) / max(1, len(deep) - 1)
        weights = {store: 2 - last - place * fall for place, store in enumerate(deep)}
        if len(deep) == 1:
            weights = {deep[0]: 1.0}
        return tuple(weights.get(store.store, 1.0) for store in program.stores)
