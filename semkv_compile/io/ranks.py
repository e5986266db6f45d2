"""Work dealt to several processes that hold the same model, on one machine or many, so that all of them end with what one would have made.

Processes exchange Python objects and CPU tensors through gloo, whatever device each computes on. An error of one is told to the others
with the next exchange, and ends them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from semkv.errors import ConfigError, ProcessError, SemkvError

Item = TypeVar("Item")
Result = TypeVar("Result")

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun`, and other launchers, set for each process."""

PATIENCE = timedelta(days=7)
"""How long a process waits for the others: units of work may be long, and a process that ended is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """This process among `count`, which all call the same methods in the same order. Of one process nothing is exchanged."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def gather(self, value: Any = None, error: Exception | None = None) -> list[Any]:
        """The values of all processes, in the order of their ranks.

        Raises
        ------
        ProcessError: another process failed or ended. Where this one has an `error` and no lower rank has, that is raised.
        """
        if self.count == 1:
            if error is not None:
                raise error
            return [value]
        found: list[Any] = [None] * self.count
        with _partner():
            torch.distributed.all_gather_object(found, (value, error))
        failed = next((rank for rank, (_, wrong) in enumerate(found) if wrong is not None), None)
        if failed is None:
            return [value for value, _ in found]
        if failed == self.rank:
            raise found[failed][1] if error is None else error
        raise ProcessError(f"process {failed} of {self.count} failed: {found[failed][1]}", told=True)

    def from_first(self, make: Callable[[], Result]) -> Result:
        """What `make` returns in the first process, alone."""
        return self.gather(make() if self.first else None)[0]

    def same(self, value: object, what: str) -> None:
        """Raise `ConfigError` where processes do not hold the same value."""
        found = self.gather(value)
        other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
        if other is not None:
            raise ConfigError(
                f"process {other} of {self.count} has another {what} than process 0: start all with the same command, files and versions"
            )

    def deal(self, items: Sequence[Item], run: Callable[[Item], Iterable[Result]]) -> Iterator[tuple[Item, Result]]:
        """What `run` yields for each item, with the item, in the order of the items, in every process; each item is run in one.

        All take one item, then exchange. Of one process results come as they are made.
        """
        for start in range(0, len(items), self.count):
            turn = items[start : start + self.count]
            if self.count == 1:
                yield from ((turn[0], result) for result in run(turn[0]))
                continue
            own = list(run(turn[self.rank])) if self.rank < len(turn) else []
            for item, results in zip(turn, self.gather(own)):
                yield from ((item, result) for result in results)

    def send(self, value: Any, to: int) -> list[Any]:
        """The values of all processes in the process `to`, an empty list in the others."""
        if self.count == 1:
            return [value]
        self.gather()  # an error of one is told here, where all call the same
        found: list[Any] | None = [None] * self.count if self.rank == to else None
        with _partner():
            torch.distributed.gather_object(value, found, dst=to)
        return found or []


ALONE = Ranks()


@contextmanager
def _partner() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's, of a connection
        raise ProcessError(
            f"another process of this run has ended ({str(error).splitlines()[0][:200]}): its own message says why; what was "
            "finished is kept, repeat the command to go on"
        ) from None


@contextmanager
def launched() -> Iterator[Ranks]:
    """The processes that a launcher such as `torchrun` started, one alone where none did. Errors within reach all of them.

    Raises
    ------
    ConfigError: the launcher's variables are not numbers, or the processes do not find each other.
    """
    given = os.environ
    if any(name not in given for name in VARIABLES) or given["WORLD_SIZE"] == "1":
        yield ALONE
        return
    try:
        ranks = Ranks(int(given["RANK"]), int(given["WORLD_SIZE"]))
        torch.distributed.init_process_group("gloo", rank=ranks.rank, world_size=ranks.count, timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{', '.join(f'{name}={given[name]}' for name in VARIABLES)}: the processes do not find each other "
            f"({str(error).splitlines()[0][:200]}); start them with torchrun"
        ) from None
    try:
        try:
            yield ranks
            ranks.gather()  # an error of the last one reaches those that are done
        except ProcessError:
            raise
        except (SemkvError, OSError) as error:
            ranks.gather(error=error)
    finally:
        torch.distributed.destroy_process_group()


def own_device(name: str, ranks: Ranks) -> str:
    """Where this process computes: of `cuda` and several processes the GPU of its number on its machine (LOCAL_RANK).

    Raises
    ------
    ConfigError: one GPU for all processes, or fewer GPUs than processes on a machine.
    """
    if ranks.count == 1 or name == "cpu":
        return name
    if ":" in name:
        raise ConfigError(f"--device {name}: {ranks.count} processes take a GPU each, so give --device cuda")
    local, present = int(os.environ.get("LOCAL_RANK", ranks.rank)), torch.cuda.device_count()
    if local >= present:
        raise ConfigError(
            f"--device {name}: process {ranks.rank} would take GPU {local}, and this machine has {present}: start at most "
            f"{present} processes here"
        )
    return f"{name}:{local}"


__all__ = ["ALONE", "Ranks", "launched", "own_device"]
