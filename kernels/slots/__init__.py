"""Which slots of a workspace hold what: bookkeeping of unfolded tokens, in C++ where there is a compiler, to the same numbers."""

from __future__ import annotations

from torch import Tensor

from semkv.kernels.cpp import compiler
from semkv.kernels.slots.cpp import assign_slots_cpp, extent_cpp, release_slots_cpp, slots_library
from semkv.kernels.slots.reference import (
    EMPTY,
    Segments,
    assign_slots_reference,
    extent_reference,
    release_slots_reference,
)


def release_slots(
    wanted: Tensor, held: Tensor, segments: Segments, segment: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See `release_slots_reference`."""
    release = release_slots_cpp if _in_cpp(positions) else release_slots_reference
    return release(wanted, held, segments, segment, tokens, positions)


def assign_slots(
    wanted: Tensor, held: Tensor, segments: Segments, segment: Tensor, tokens: Tensor, missing: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `assign_slots_reference`."""
    assign = assign_slots_cpp if _in_cpp(segment) else assign_slots_reference
    return assign(wanted, held, segments, segment, tokens, missing)


def extent(segment: Tensor) -> int:
    """See `extent_reference`."""
    return extent_cpp(segment) if _in_cpp(segment) else extent_reference(segment)


def _in_cpp(stored: Tensor) -> bool:
    return stored.device.type == "cpu" and compiler() is not None and slots_library().failure() is None


__all__ = ["EMPTY", "Segments", "assign_slots", "extent", "release_slots"]
