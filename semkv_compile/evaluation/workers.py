"""Several contexts of a grid at once, each in a process of its own: steps of small models do not keep two cores busy."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from semkv.errors import ConfigError, SemkvError

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS = 1.0
"""After which it is looked whether a worker has died."""

SMALL_PARAMETERS = 500_000_000
"""Parameters of a model up to which processes of one thread are taken to be faster together than one process of several threads."""


def default_workers(model: nn.Module, device: torch.device) -> int:
    """One process for each thread that PyTorch would use, where the model is small and on a CPU; else one."""
    small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL_PARAMETERS
    return torch.get_num_threads() if small and device.type == "cpu" and sys.platform == "linux" else 1


def check_workers(workers: int, device: torch.device) -> None:
    """Raise `ConfigError` where that many processes cannot run a model on `device`."""
    if workers < 1:
        raise ConfigError(f"workers {workers}: expected at least 1")
    if workers > 1 and device.type != "cpu":
        raise ConfigError(f"workers {workers}: processes share a model on the CPU only, and it is on {device}; use 1")
    if workers > 1 and sys.platform != "linux":
        raise ConfigError(f"workers {workers}: processes share a model where they can be forked, on Linux; use 1")


def in_processes(
    run: Callable[[Item], Iterator[Result]], items: Sequence[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """What `run` yields for each item, with the item, in the order in which it comes.

    The processes are forked, so that they share the memory of what `run` knows, and compute in one thread each. The first error of
    one of them ends all and is raised here. Results must be picklable.

    Raises
    ------
    RuntimeError: a worker was killed, for want of memory perhaps.
    """
    context = multiprocessing.get_context("fork")
    begun, made = context.Value("q", 0), context.Queue()
    count = min(workers, len(items))
    started = [context.Process(target=_work, args=(run, items, begun, made), daemon=True) for _ in range(count)]
    for process in started:
        process.start()
    try:
        left = count
        while left:
            place, result, error = _next(made, started)
            if error is not None:
                raise error
            if place is None:
                left -= 1
            else:
                yield items[place], result
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _work(run: Callable[[Any], Iterator[Any]], items: Sequence[Any], begun: Any, made: Any) -> None:
    """One process: items that none has begun, until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # their threads do not outlive a fork, which they would warn of
    torch.set_num_threads(1)
    try:
        while (place := _take(begun)) < len(items):
            for result in run(items[place]):
                made.put((place, result, None))
        made.put((None, None, None))
    except SemkvError as error:
        made.put((None, None, error))
    except Exception:
        made.put((None, None, RuntimeError(f"a worker failed:\n{traceback.format_exc()}")))


def _take(begun: Any) -> int:
    """The number of items that have been begun, which this adds one to."""
    with begun.get_lock():
        begun.value += 1
        return begun.value - 1


def _next(made: Any, started: Sequence[Any]) -> tuple[int | None, Any, Exception | None]:
    while True:
        try:
            return made.get(timeout=POLL_SECONDS)
        except queue.Empty:
            dead = [process.exitcode for process in started if process.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(
                    f"a worker ended with {dead[0]} (a negative number is the signal that ended it); what was measured is kept: "
                    "run again, with fewer workers where memory was short"
                ) from None


__all__ = ["check_workers", "default_workers", "in_processes"]
