"""Memory of the process that nothing uses any more."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """`malloc_trim` of the C library; None where it has none (it is glibc's)."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def return_freed() -> None:
    """Give memory that was freed, and that the C library keeps for what may come, back to the system.

    What a prompt computes on the way to its state is hundreds of megabytes at a time and in many sizes: without this, much of it would
    stay with the process. It takes milliseconds.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


__all__ = ["return_freed"]
