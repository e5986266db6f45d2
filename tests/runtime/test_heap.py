"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes

import pytest
import torch

from semkv.runtime.host import heap
from semkv.runtime.host.heap import return_freed

PIECES, NUMBERS = 400, 1 << 17
"""400 tensors of half a megabyte: small enough that the C library keeps them, once it has freed larger ones."""


def resident() -> int:
    """Anonymous bytes of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_what_is_freed_between_what_is_kept_goes_back():
    torch.ones(1 << 22)  # freed at once: from now on, pieces of up to 16 MB come from the heap
    before = resident()
    pieces = [torch.ones(NUMBERS) for _ in range(PIECES)]
    kept = pieces[-1]
    pieces.clear()
    assert resident() - before > PIECES * NUMBERS * 4 / 2, "nothing was kept, so that nothing is shown"
    return_freed()
    assert resident() - before < PIECES * NUMBERS * 4 / 4
    assert float(kept.sum()) == NUMBERS


def test_another_c_library_is_left_alone(monkeypatch):
    heap._trim.cache_clear()
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    return_freed()
    heap._trim.cache_clear()
