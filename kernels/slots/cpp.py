"""Slots of a workspace in C++: one pass over segments and slots for what takes PyTorch two dozen, to the same numbers."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.cpp import Library, library
from semkv.kernels.slots.reference import EMPTY

TEMPLATE = Path(__file__).parent / "template.cpp"


def slots_library() -> Library:
    """The object of the three functions."""
    return library(TEMPLATE, {})


def release_slots_cpp(
    wanted: Tensor, held: Tensor, length: Tensor, segment: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """As `release_slots_reference`, with all tensors on the CPU and the slots' own contiguous."""
    wanted, held, length = (x.contiguous() for x in (wanted, held, length))
    kept, missing = torch.empty(2, len(wanted), dtype=torch.int64)
    _run("release", wanted, held, length, segment, tokens, positions, kept, missing, *_sizes(wanted, segment), EMPTY)
    return kept, missing


def assign_slots_cpp(
    wanted: Tensor, held: Tensor, length: Tensor, start: Tensor, segment: Tensor, tokens: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """As `assign_slots_reference`, of `count` tokens that are missing."""
    wanted, held, length, start = (x.contiguous() for x in (wanted, held, length, start))
    at, heads = torch.empty(2, count, dtype=torch.int64)
    _run("assign", wanted, held, length, start, segment, tokens, at, heads, *_sizes(wanted, segment))
    return at, heads


def extent_cpp(segment: Tensor) -> int:
    """As `extent_reference`."""
    last = torch.empty((), dtype=torch.int64)
    _run("extent", segment, last, *segment.shape)
    return int(last)


def _sizes(wanted: Tensor, segment: Tensor) -> tuple[int, int, int]:
    return *wanted.shape, segment.shape[1]


def _run(name: str, *arguments: Tensor | int) -> None:
    """Call a function of the template with addresses and sizes."""
    values = [c_void_p(x.data_ptr()) if isinstance(x, Tensor) else c_int64(x) for x in arguments]
    slots_library().function(name)(*values)
