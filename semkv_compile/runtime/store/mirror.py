"""What a step's graph reads of folded units, on the device of the step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from semkv.runtime.host.mapped import mapped

WAITING = "waiting."
"""How the names of tokens that wait begin: those are read where they are."""


class Mirror:
    """Copies of tensors of the host on `device`. They are written anew, in place, when the others have changed, so that a recorded step
    finds them where they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of: Mapping[str, Tensor] | None = None
        self._there: dict[str, Tensor] = {}

    def tensors(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`own` by the same names on the device; another dict means that the tensors have changed."""
        if self.device.type == "cpu":
            return own
        if self._of is not own:
            self._there = {name: self._on_device(name, x) for name, x in own.items()}
            self._of = own
        return self._there

    def _on_device(self, name: str, x: Tensor) -> Tensor:
        if x.device.type == self.device.type:
            return x
        if name.startswith(WAITING):
            return mapped(x, self.device)
        known = self._there.get(name)
        if known is None or known.shape != x.shape or known.dtype != x.dtype:
            return x.to(self.device)
        return known.copy_(x)


class StepSide:
    """What a step's graph on `device` reads besides a memory's own tensors: of its folded units, and what a method brings to the step."""

    def __init__(self, device: torch.device) -> None:
        self.units, self.brought = Mirror(device), Mirror(device)
        self._by_position = torch.empty(0, dtype=torch.float32, device=device)

    def by_position(self, room: int) -> Tensor:
        """float32 [room] without numbers: places by position, in which one layer leaves something for later ones."""
        if len(self._by_position) != room:
            self._by_position = self._by_position.new_empty(room)
        return self._by_position


def named(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a part of the memory by the names that a step's graph has for them."""
    return dict(zip(_names(part, tuple(tensors)), tensors.values()))


@cache
def _names(part: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{part}.{name}" for name in names)


__all__ = ["Mirror", "StepSide", "named"]
