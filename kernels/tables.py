"""Small tables of whole numbers that kernels read, on their way from the host to a device.

A recorded step sends the same tables again each time it is replayed, from where they were: there they have to stay.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ROOM = 1 << 16
"""Numbers that the tables of a recorded step may have together."""


class Tables:
    """Page-locked memory for the tables of one recording."""

    def __init__(self) -> None:
        self._numbers = torch.empty(ROOM, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
        self._used = 0

    def keep(self, table: Tensor) -> Tensor:
        """`table` int64 [n] in memory that stays. Raises `RuntimeError` where there is no room for it."""
        end = self._used + len(table)
        if end > ROOM:
            raise RuntimeError(f"its tables have more than {ROOM} numbers")
        place, self._used = self._numbers[self._used : end], end
        return place.copy_(table)


class _OfThread(threading.local):
    tables: Tables | None = None


_recorded = _OfThread()


@contextmanager
def kept_in(tables: Tables) -> Iterator[None]:
    """What this thread sends meanwhile stays in `tables`."""
    _recorded.tables = tables
    try:
        yield
    finally:
        _recorded.tables = None


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on `device`."""
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if _recorded.tables is not None:
        table = _recorded.tables.keep(table)
    return table.to(device, non_blocking=device.type != "meta")


__all__ = ["Tables", "kept_in", "sent"]
