"""What the prompt's end looks at stays; all else is dropped after prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from semkv.ir.program import Program
from semkv.methods.base import OncePerPrompt
from semkv.methods.keepers import ObservationWindow
from semkv.methods.options import Queries, Width
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components


@dataclass(frozen=True)
class SnapKV(OncePerPrompt):
    """SnapKV (Li et al., 2024): an observation window at the prompt's end votes for the tokens that each KV head keeps.

    The paper keeps every generated token (`generated="kept"`); under a hard budget the oldest of them leave. window: observing
    queries, tokens (the budget may shrink it to half of what is kept). kernel, pool: 1-D pooling of the votes.
    """

    window: Queries = 32
    kernel: Width = 7
    pool: Literal["max", "mean"] = "max"

    name: ClassVar[str] = "snapkv"
    minimum_tokens: ClassVar[int] = 24

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components(keeper=ObservationWindow(self.window, self.kernel, self.pool), outside="dropped")
