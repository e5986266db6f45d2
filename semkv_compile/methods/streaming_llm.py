"""Attention sinks and a recent window; all else is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.methods.keepers import Sinks
from semkv.methods.options import TokensOrNone
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components


@dataclass(frozen=True)
class StreamingLLM(Method):
    """StreamingLLM (Xiao et al., 2024): the first `sinks` tokens and as many recent ones as the budget holds.

    Keys keep the positions they were computed at. sinks: tokens, 4 in the paper.
    """

    sinks: TokensOrNone = 4

    name: ClassVar[str] = "streaming_llm"
    minimum_tokens: ClassVar[int] = 24

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components(keeper=Sinks(self.sinks), outside="dropped")
