"""Every token exact on the device: the reference that all other methods are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components


@dataclass(frozen=True)
class Full(Method):
    """Full KV cache. No parameters, no budget."""

    name: ClassVar[str] = "full"
    compresses: ClassVar[bool] = False

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components()
