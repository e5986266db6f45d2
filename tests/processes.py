"""A few gloo processes for tests, forked, so that they know what the test knows."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from semkv.io.ranks import Ranks, launched


def in_ranks(run: Callable[[Ranks], Any], count: int = 2) -> list[Any]:
    """What `run` returns or raises in each of `count` processes of one thread, by rank; None of one that ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    started = [context.Process(target=_run, args=(run, rank, count, port, answers)) for rank in range(count)]
    for process in started:
        process.start()
    found: dict[int, Any] = {}
    while len(found) < count and (any(process.is_alive() for process in started) or not answers.empty()):
        with suppress(queue.Empty):
            rank, value = answers.get(timeout=0.2)
            found[rank] = pickle.loads(value)
    for process in started:
        process.join()
    return [found.get(rank) for rank in range(count)]


def _run(run: Callable[[Ranks], Any], rank: int, count: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        with launched() as ranks:
            found = run(ranks)
    except Exception as error:
        error.add_note(traceback.format_exc())
        found = error
    answers.put((rank, pickle.dumps(found)))  # a tensor's memory would be shared, and gone with the process
