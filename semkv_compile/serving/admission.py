"""How much of an engine's memory a request takes, in units that the engine hands out: a table by the request's length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semkv.errors import ConfigError
from semkv.runtime.budgets.request_bytes import RequestBytes

UNIT = 1 << 20
"""Bytes that one unit stands for."""
LENGTHS = 512
"""Lengths in a table, at most."""


@dataclass(frozen=True)
class Admission:
    """Units of a request by its length; between the lengths of the table, those of the next one.

    step: tokens from one length of the table to the next. reading: while its prompt is read, by length. running: after it.
    """

    step: int
    reading: tuple[int, ...]
    running: tuple[int, ...]

    @classmethod
    def of(cls, request_bytes: Callable[[int], RequestBytes], longest: int, *, host: bool) -> Admission:
        """The table for requests of up to `longest` tokens. host: whether the host's part counts, as where there is no other memory."""
        step = max(1, -(-longest // LENGTHS))
        bounds = [request_bytes(min(length, longest)) for length in range(step, longest + step, step)]
        return cls(
            step,
            _rising([units(x.device + (x.reading if host else 0)) for x in bounds]),
            _rising([units(x.device + (x.host if host else 0)) for x in bounds]),
        )

    @classmethod
    def largest(cls, tables: Sequence[Admission]) -> Admission:
        """What suffices for each of `tables`, which are of the same lengths: those of processes that share a model."""
        reading = tuple(max(each) for each in zip(*(table.reading for table in tables)))
        return cls(tables[0].step, reading, tuple(max(each) for each in zip(*(table.running for table in tables))))

    def units(self, length: int, *, reading: bool) -> int:
        """Of a request of `length` tokens so far."""
        table = self.reading if reading else self.running
        return table[min(max(0, -(-length // self.step) - 1), len(table) - 1)]

    @property
    def most(self) -> int:
        """Of the longest request, at any time."""
        return max(self.reading[-1], self.running[-1])

    def check(self, memory: int, longest: int) -> None:
        """Raise `ConfigError` where a request of `longest` tokens could never run in `memory` units."""
        if self.most <= memory:
            return
        fitting = [n for n, (a, b) in enumerate(zip(self.reading, self.running), 1) if max(a, b) <= memory]
        hint = f", or --max-model-len {fitting[-1] * self.step}" if fitting else ""
        raise ConfigError(
            f"a request of {longest} tokens takes up to {self.most * UNIT >> 20} MiB, and --memory is {memory * UNIT >> 20} MiB: give "
            f"more{hint}"
        )


def units(nbytes: int) -> int:
    """Units that hold so many bytes; at least one, by which a request is known."""
    return max(1, -(-nbytes // UNIT))


def _rising(values: list[int]) -> tuple[int, ...]:
    """Each value or the largest before it: a longer request never takes less, so that what was handed out suffices."""
    out: list[int] = []
    for value in values:
        out.append(max(value, out[-1] if out else 0))
    return tuple(out)


__all__ = ["UNIT", "Admission", "units"]
