"""Folded tokens fetched ahead of need by a thread, into buffers that are never reused while a copy is in flight."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from semkv.runtime.host_pool import RoomKinds

POLL_SECONDS = 0.05
"""How often a waiting step looks whether the worker still lives."""
END_SECONDS = 10
"""How long a program that ends waits for the fetch that is under way."""


class Source(Protocol):
    """Where tokens come from; `semkv.runtime.host_pool.HostTokens` is one."""

    def fill(
        self, rooms: Sequence[Tensor], at: Tensor, index: Tensor, heads: Tensor, *, threads: int | None = None
    ) -> None:
        """Write the tokens at places `index` int64 [n] of heads `heads` int64 [n] into the rows `at` int64 [n] of `rooms`: keys [rows, D]
        and values [rows, Dv], or their codes of 8 bits, and scales [rows, 1] of keys and of values. threads: that take part where
        it is C++ that copies, by default as many as PyTorch's."""


class Pool(Source, Protocol):
    """A source whose tokens wait in memory of its own."""

    @property
    def in_place(self) -> bool:
        """Whether a GPU reads the tokens where they wait, so that `fill` only launches what writes k and v on the device."""


Wanted = Callable[[], tuple[Tensor, Tensor]]
"""What says which tokens to fetch: heads and places, int64 [n] each. The thread calls it, so that asking costs the caller nothing."""


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.int64, device="cpu")


@dataclass(eq=False)
class Fetch:
    """Tokens on their way: places int64 [n] in heads int64 [n] of a source, known once they have arrived.

    From `Prefetcher.submit` to `Prefetcher.release` its buffer belongs to it alone. began, ended: when the thread was at it, seconds of
    `time.perf_counter`.
    """

    source: Pool
    wanted: Wanted
    buffer: Buffer
    heads: Tensor = field(default_factory=_none)
    places: Tensor = field(default_factory=_none)
    began: float = 0.0
    ended: float = 0.0
    error: BaseException | None = None
    arrived: threading.Event = field(default_factory=threading.Event)
    released: bool = False

    @property
    def count(self) -> int:
        """n."""
        return len(self.places)


class Buffer:
    """Room for `capacity` tokens on the device, and on CUDA pinned memory for tokens that cannot be read where they wait.

    copied: the last copy into it; read: what the step that released it launched. Both only on CUDA.
    """

    def __init__(self, capacity: int, kinds: RoomKinds, device: torch.device) -> None:
        def room(device: torch.device | str, pinned: bool = False) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(capacity, dim, dtype=dtype, device=device, pin_memory=pinned) for dim, dtype in kinds
            )

        self._room = room
        self._passing: tuple[Tensor, ...] | None = None
        self.tensors = room(device)
        self.copied: torch.cuda.Event | None = None
        self.read: torch.cuda.Event | None = None

    def passing(self) -> tuple[Tensor, ...]:
        """Pinned memory that tokens pass through, made when the first ones do."""
        if self._passing is None:
            self._passing = self._room("cpu", pinned=True)
        return self._passing

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(x.nbytes for x in self.tensors)


class Prefetcher:
    """One worker thread and a few buffers. Whatever fails, the caller still gets its tokens: `wait` then returns None, and they
    are fetched by the caller itself.

    capacity: tokens that a buffer holds. kinds: what it has of each. buffers: how many fetches may be under way or in use at once.
    faults: fetches that failed; the first one warns whoever waits for it.
    """

    def __init__(self, capacity: int, kinds: RoomKinds, device: torch.device, *, buffers: int = 2) -> None:
        self.capacity = capacity
        self.faults = 0
        self._warned = False
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free = [Buffer(capacity, kinds, device) for _ in range(buffers)]
        self._nbytes = sum(buffer.nbytes for buffer in self._free)
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(device))  # on which their memory may still be in use
            for room in (room for buffer in self._free for room in buffer.tensors):
                room.record_stream(self._copies)  # not given away while a copy into it is under way
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._dead = False
        self._close = weakref.finalize(self, self._queue.put, None)
        self._close.atexit = False  # `_finish` does more

    @property
    def nbytes(self) -> int:
        """Device bytes of the buffers."""
        return self._nbytes

    @property
    def works(self) -> bool:
        """False once the worker has died or `close` was called: nothing is fetched ahead any more."""
        return not self._dead

    def submit(self, source: Pool, wanted: Wanted) -> Fetch | None:
        """Begin to fetch what `wanted` says; None where no buffer is free, or nothing is fetched ahead.

        What `wanted` reads, and what `source` holds at these places, must not change until the fetch has arrived. One of more
        tokens than `capacity` fails.
        """
        with self._lock:
            if self._dead or not self._free:
                return None
            if self._worker is None:
                # The thread holds no reference to the prefetcher while it waits, so that one that is forgotten ends it.
                worker = threading.Thread(
                    target=_work, args=(self._queue, weakref.ref(self)), name="semkv-prefetch", daemon=True
                )
                try:
                    worker.start()
                except RuntimeError as cause:  # the system has no thread left
                    self._dead = True
                    self._warn(cause)
                    return None
                self._worker = worker
                finish = partial(_finish, self._queue, worker)
                atexit.register(finish)
                weakref.finalize(self, atexit.unregister, finish).atexit = False
            fetch = Fetch(source, wanted, self._free.pop())
            self._queue.put(fetch)
            return fetch

    def wait(self, fetch: Fetch) -> tuple[Tensor, ...] | None:
        """The tokens in rooms of n rows on the device, as `Source.fill` writes them, valid until `release`; None where the fetch failed."""
        while not fetch.arrived.wait(POLL_SECONDS):
            if self._worker is None or not self._worker.is_alive():
                self._bury(RuntimeError("the prefetch thread has ended"))
                if not fetch.arrived.is_set():
                    self._arrive(fetch, RuntimeError("the prefetch thread has ended"))
        if fetch.error is not None:
            self._warn(fetch.error)
            return None
        if fetch.buffer.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(fetch.buffer.copied)
        return tuple(x[: fetch.count] for x in fetch.buffer.tensors)

    def release(self, fetch: Fetch) -> None:
        """The caller is done with a fetch, arrived or not; its buffer is free once no copy into it is under way."""
        with self._lock:
            if fetch.released:
                return
            fetch.released = True
            if self._device.type == "cuda":
                fetch.buffer.read = torch.cuda.current_stream(self._device).record_event()
            if fetch.arrived.is_set():
                self._free.append(fetch.buffer)

    def close(self) -> None:
        """End the worker; fetches under way fail."""
        self._bury(RuntimeError("the prefetcher was closed"))
        self._close()  # behind what is buried, which takes all that is queued

    # -- the worker's side -------------------------------------------------------------------------------------------

    def _arrive(self, fetch: Fetch, error: BaseException | None = None) -> None:
        with self._lock:
            if fetch.arrived.is_set():
                return
            fetch.error, fetch.ended = error, time.perf_counter()
            self.faults += error is not None
            fetch.arrived.set()
            if fetch.released:
                self._free.append(fetch.buffer)

    def _warn(self, error: BaseException) -> None:
        """Once, that steps are slower than they could be."""
        if not self._warned:
            self._warned = True
            ever = "" if self.works else ", and nothing is fetched ahead any more"
            warnings.warn(
                f"tokens could not be fetched ahead ({error}){ever}: steps fetch them themselves, which is slower",
                stacklevel=2,
            )

    def _bury(self, cause: BaseException) -> None:
        """Nothing is fetched any more; what is queued fails."""
        with self._lock:
            self._dead = True
        while True:
            try:
                fetch = self._queue.get_nowait()
            except queue.Empty:
                return
            if fetch is not None:
                self._arrive(fetch, cause)

    def _fetch(self, fetch: Fetch) -> None:
        fetch.began = time.perf_counter()
        fetch.heads, fetch.places = fetch.wanted()
        if fetch.count > self.capacity:
            raise ValueError(f"{fetch.count} tokens for a buffer of {self.capacity}")
        buffer, at = fetch.buffer, torch.arange(fetch.count, dtype=torch.int64, device="cpu")
        if self._copies is None:
            # The processor computes the step meanwhile: a second team of threads would be in its way.
            fetch.source.fill(buffer.tensors, at, fetch.places, fetch.heads, threads=1)
            return
        passing = None if fetch.source.in_place else buffer.passing()
        if passing is not None:
            if buffer.copied is not None:
                buffer.copied.synchronize()  # the pinned memory may still be on its way; only this thread waits
            fetch.source.fill(passing, at, fetch.places, fetch.heads)
        with torch.cuda.stream(self._copies):
            if buffer.read is not None:
                self._copies.wait_event(buffer.read)
            if passing is None:
                fetch.source.fill(buffer.tensors, at, fetch.places, fetch.heads)
            else:
                for room, pinned in zip(buffer.tensors, passing):
                    room[: fetch.count].copy_(pinned[: fetch.count], non_blocking=True)
            buffer.copied = self._copies.record_event()


def _finish(tasks: queue.SimpleQueue[Fetch | None], worker: threading.Thread) -> None:
    """At the end of the program: a thread that Python ends in the midst of C++ takes the process down with it."""
    tasks.put(None)
    worker.join(END_SECONDS)


def _work(tasks: queue.SimpleQueue[Fetch | None], owner: weakref.ref[Prefetcher]) -> None:
    """Fetch until the queue gives None or the prefetcher is gone."""
    while (fetch := tasks.get()) is not None:
        prefetcher = owner()
        if prefetcher is None:
            return
        error: BaseException | None = None
        try:
            with torch.inference_mode():  # the caller's mode is not the thread's, and buffers may be of any
                prefetcher._fetch(fetch)
        except Exception as cause:
            error = cause.with_traceback(None)  # it would hold the prefetcher
        except BaseException as cause:  # the thread was told to end
            prefetcher._arrive(fetch, cause)
            prefetcher._bury(cause)
            return
        prefetcher._arrive(fetch, error)
        del prefetcher, fetch, error


__all__ = ["Buffer", "Fetch", "Pool", "Prefetcher", "Source", "Wanted"]
