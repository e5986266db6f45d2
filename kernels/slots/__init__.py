"""Which slots of a workspace hold what: bookkeeping of unfolded tokens, in C++ where there is a compiler, to the same numbers."""

from __future__ import annotations

from torch import Tensor

from semkv.kernels.cpp import compiler
from semkv.kernels.slots.cpp import assign_slots_cpp, extent_cpp, release_slots_cpp, slots_library
from semkv.kernels.slots.reference import (
    EMPTY,
    assign_slots_reference,
    extent_reference,
    release_slots_reference,
)


def release_slots(
    wanted: Tensor, held: Tensor, length: Tensor, segment: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See `release_slots_reference`."""
    if _in_cpp(positions):
        return release_slots_cpp(wanted, held, length, segment, tokens, positions)
    return release_slots_reference(wanted, held, length, segment, tokens, positions)


def assign_slots(
    wanted: Tensor, held: Tensor, length: Tensor, start: Tensor, segment: Tensor, tokens: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """See `assign_slots_reference`; count: tokens that are missing, over all heads."""
    if _in_cpp(segment):
        return assign_slots_cpp(wanted, held, length, start, segment, tokens, count)
    return assign_slots_reference(wanted, held, length, start, segment, tokens)


def extent(segment: Tensor) -> int:
    """See `extent_reference`."""
    return extent_cpp(segment) if _in_cpp(segment) else extent_reference(segment)


def _in_cpp(stored: Tensor) -> bool:
    return stored.device.type == "cpu" and compiler() is not None and slots_library().failure() is None


__all__ = ["EMPTY", "assign_slots", "extent", "release_slots"]
