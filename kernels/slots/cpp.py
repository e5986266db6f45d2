"""Slots of a workspace in C++: one pass over segments and slots for what takes PyTorch two dozen, to the same numbers."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, library, team
from semkv.kernels.slots.reference import EMPTY, Even, Segments

TEMPLATE = Path(__file__).parent / "template.cpp"
TENSORS = {
    "wanted": (torch.bool, "HS"),
    "held": (torch.bool, "HK"),
    "length": (torch.int64, "S"),
    "position": (torch.int64, "S"),
    "start": (torch.int64, "S"),
    "segment": (torch.int64, "HN"),
    "tokens": (torch.int64, "HN"),
    "positions": (torch.int32, "HN"),
    "kept": (torch.int64, "H"),
    "missing": (torch.int64, "H"),
    "at": (torch.int64, "M"),
    "owner": (torch.int64, "M"),
    "place": (torch.int64, "M"),
    "where": (torch.int32, "M"),
}
"""Dtype and sizes of what the template reads and writes: H heads, S segments, K of them known, N slots, M tokens that are missing."""
NUMBERS = ("heads", "segments", "known", "slots", "empty", "even_length", "even_position", "even_start", "threads")


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        ("parallel", ctypes.c_void_p),
    )


@cache
def slots_library() -> Library:
    """The object of the three functions."""
    return library(TEMPLATE, {})


def release_slots_cpp(
    wanted: Tensor, held: Tensor, segments: Segments, segment: Tensor, tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """As `release_slots_reference`, with all tensors on the CPU and the slots' own contiguous."""
    kept, missing = torch.empty(2, len(wanted), dtype=torch.int64, device="cpu")
    slots = {"segment": segment, "tokens": tokens, "positions": positions}
    _run("release", segments, wanted=wanted.contiguous(), held=held.contiguous(), **slots, kept=kept, missing=missing)
    return kept, missing


def assign_slots_cpp(
    wanted: Tensor, held: Tensor, segments: Segments, segment: Tensor, tokens: Tensor, missing: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `assign_slots_reference`."""
    at, owner, place = torch.empty(3, int(missing.sum()), dtype=torch.int64, device="cpu")
    made = {"at": at, "owner": owner, "place": place, "where": torch.empty(len(at), dtype=torch.int32, device="cpu")}
    slots = {"segment": segment, "tokens": tokens, "missing": missing}
    _run("assign", segments, wanted=wanted.contiguous(), held=held.contiguous(), **slots, **made)
    return at, owner, place, made["where"]


def extent_cpp(segment: Tensor) -> int:
    """As `extent_reference`."""
    last = torch.empty(len(segment), dtype=torch.int64, device="cpu")
    _run("extent", None, segment=segment, kept=last)
    return int(last[0])


def _run(name: str, segments: Segments | None, **tensors: Tensor) -> None:
    """Call a function of the template with what it reads and writes."""
    even = Even(0, 0, 0) if segments is None or segments.even is None else segments.even
    if segments is not None and not even.length:
        tables = {"length": segments.length, "position": segments.position, "start": segments.start}
        tensors |= {name: table.contiguous() for name, table in tables.items()}
    heads, slots = tensors["segment"].shape
    sizes = {"H": heads, "N": slots, "S": 0, "K": 0, "M": 0}
    for field, letter in (("wanted", "S"), ("held", "K"), ("at", "M")):
        if field in tensors:
            sizes[letter] = tensors[field].shape[-1]
    given = {
        field: address_of(field, x, TENSORS[field][0], tuple([sizes[letter] for letter in TENSORS[field][1]]))
        for field, x in tensors.items()
    }
    call = _Call(
        *(given.get(field) for field in TENSORS),
        heads,
        sizes["S"],
        sizes["K"],
        slots,
        EMPTY,
        *even,
        torch.get_num_threads(),
        team(),
    )
    slots_library().function(name)(ctypes.byref(call))
