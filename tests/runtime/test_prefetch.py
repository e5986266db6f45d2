"""The prefetcher's protocol under delays, failures, dead workers, and any order of its callers' actions."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semkv.runtime import prefetch
from semkv.runtime.host_pool import HostTokens, room_kinds
from semkv.runtime.prefetch import Fetch, Prefetcher, Wanted

pytestmark = pytest.mark.filterwarnings("ignore:tokens could not be fetched ahead")
HEADS, TOKENS, DIMS, CAPACITY = 2, 12, (3, 2), 6
CPU = torch.device("cpu")
SECONDS = 20
"""No test waits longer: a hang is a failure."""


def stored() -> HostTokens:
    """Tokens whose numbers say where they are."""
    tokens = HostTokens(HEADS, *DIMS, torch.float32, "raw")
    k, v = (torch.arange(HEADS * TOKENS * dim, dtype=torch.float32).view(HEADS, TOKENS, dim) for dim in DIMS)
    tokens.append(k, -v)
    return tokens


STORED = stored()


@dataclass
class Gated:
    """The stored tokens behind a gate: a fetch waits until it is opened, and then may fail."""

    error: BaseException | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    in_place = False

    def fill(self, *given: Any, threads: int | None = None) -> None:
        assert self.gate.wait(SECONDS)
        if self.error is not None:
            raise self.error
        STORED.fill(*given, threads=threads)


def make(buffers: int = 2) -> Prefetcher:
    return Prefetcher(CAPACITY, room_kinds(*DIMS, torch.float32, codes=False), CPU, buffers=buffers)


ROWS = st.lists(st.tuples(st.integers(0, HEADS - 1), st.integers(0, TOKENS - 1)), max_size=CAPACITY)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.booleans(), ROWS),
    st.tuples(st.sampled_from(("open", "wait", "release")), st.integers(0, 11), st.none()),
)
"""`submit` with whether it fails, and its heads and places; the others with the fetch that they are about."""
SCHEDULES = st.tuples(st.integers(1, 3), st.lists(ACTIONS, min_size=1, max_size=14))
"""Buffers and actions: drawn before anything runs, as threads make what happens depend on time."""


def indices(rows: list[tuple[int, int]]) -> Wanted:
    both = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
    return lambda: (both[:, 0], both[:, 1])


ONE = indices([(0, 1)])


def check(got: tuple[Tensor, Tensor] | None, fetch: Fetch, fails: bool) -> None:
    if fails:
        assert got is None
        return
    assert got is not None
    for mine, theirs in zip(got, STORED.gather(fetch.places, fetch.heads)):
        assert torch.equal(mine, theirs)


@settings(max_examples=300, deadline=None)
@given(SCHEDULES)
def test_any_schedule_gives_the_tokens_that_were_asked_for(schedule):
    run_schedule(*schedule)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(SCHEDULES)
def test_thousands_of_schedules(schedule):
    run_schedule(*schedule)


def run_schedule(buffers: int, actions: list[tuple[str, Any, Any]]) -> None:
    """Fetches are begun, let through, waited for and released in any order; some fail, some are released before they arrive."""
    prefetcher = make(buffers)
    live: list[tuple[Fetch, Gated]] = []
    for action, what, rows in actions:
        if action == "submit":
            gated = Gated(OSError("unplugged") if what else None)
            under_way = [f for f, _ in live if not f.arrived.is_set()]
            busy = {id(f.buffer) for f in (*under_way, *(f for f, _ in live if not f.released))}
            fetch = prefetcher.submit(gated, indices(rows))
            if fetch is None:
                assert len(busy) == buffers
                continue
            # A buffer that is in use or under way is never given away.
            still = [f.buffer for f, _ in live if not (f.released and f.arrived.is_set())]
            assert all(fetch.buffer is not buffer for buffer in still)
            live.append((fetch, gated))
            fetch.buffer.tensors[0].fill_(float("nan"))
        elif live:
            fetch, gated = live[what % len(live)]
            if action == "open":
                gated.gate.set()
            elif action == "wait" and not fetch.released:
                for _, earlier in live[: live.index((fetch, gated)) + 1]:
                    earlier.gate.set()  # the worker takes them in order
                check(prefetcher.wait(fetch), fetch, gated.error is not None)
            elif action == "release":
                prefetcher.release(fetch)
    for _, gated in live:
        gated.gate.set()
    for fetch, gated in live:
        assert fetch.arrived.wait(SECONDS)
        if not fetch.released:
            check(prefetcher.wait(fetch), fetch, gated.error is not None)
        prefetcher.release(fetch)
    assert prefetcher.faults == sum(gated.error is not None for _, gated in live)
    # Every buffer is back, once.
    last = [prefetcher.submit(STORED, ONE) for _ in range(buffers + 1)]
    assert last[-1] is None
    assert len({id(fetch.buffer) for fetch in last[:-1] if fetch is not None}) == buffers
    prefetcher.close()


def test_the_first_failure_is_told():
    prefetcher = make(1)
    told = []
    for _ in range(2):
        gated = Gated(OSError("unplugged"))
        gated.gate.set()
        fetch = prefetcher.submit(gated, ONE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert prefetcher.wait(fetch) is None
        told += [str(one.message) for one in caught]
        prefetcher.release(fetch)
    assert told == ["tokens could not be fetched ahead (unplugged): steps fetch them themselves, which is slower"]


def test_a_failure_is_counted_and_the_next_fetch_works():
    prefetcher = make(1)
    for number, source in enumerate((Gated(OSError("unplugged")), STORED)):
        if isinstance(source, Gated):
            source.gate.set()
        fetch = prefetcher.submit(source, ONE)
        check(prefetcher.wait(fetch), fetch, number == 0)
        prefetcher.release(fetch)
    assert prefetcher.faults == 1
    assert prefetcher.works


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_a_fetch_is_what_was_asked_for(count):
    prefetcher = make(1)
    fetch = prefetcher.submit(STORED, indices([(row % HEADS, row) for row in range(count)]))
    check(prefetcher.wait(fetch), fetch, False)
    assert fetch.count == count
    prefetcher.release(fetch)


def test_a_worker_that_dies_leaves_nobody_waiting():
    prefetcher = make(3)
    deadly, behind = Gated(SystemExit()), Gated()
    fetches = [prefetcher.submit(source, ONE) for source in (deadly, behind)]
    deadly.gate.set()
    assert [prefetcher.wait(fetch) for fetch in fetches] == [None, None]
    assert not prefetcher.works
    assert prefetcher.submit(STORED, ONE) is None


def test_a_worker_that_vanishes_is_noticed(monkeypatch):
    monkeypatch.setattr(prefetch, "_work", lambda tasks, owner: None)  # ends at once, without a word
    prefetcher = make()
    assert prefetcher.wait(prefetcher.submit(STORED, ONE)) is None
    assert not prefetcher.works
    assert prefetcher.faults == 1


def test_without_threads_nothing_is_fetched_ahead(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    prefetcher = make(2)
    with pytest.warns(
        UserWarning, match=r"\(can't start new thread\), and nothing is fetched ahead any more: steps fetch"
    ):
        assert prefetcher.submit(STORED, ONE) is None
    assert not prefetcher.works
    assert prefetcher.submit(STORED, ONE) is None
    prefetcher.close()


def test_closing_fails_what_is_queued():
    prefetcher = make(3)
    running, queued = Gated(), Gated()
    fetches = [prefetcher.submit(source, ONE) for source in (running, queued)]
    prefetcher.close()
    running.gate.set()
    assert prefetcher.wait(fetches[1]) is None
    check(prefetcher.wait(fetches[0]), fetches[0], fetches[0].error is not None)
    prefetcher._worker.join(SECONDS)
    assert not prefetcher._worker.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_a_forgotten_prefetcher_ends_its_thread(fails):
    prefetcher = make()
    gated = Gated(OSError("unplugged") if fails else None)
    gated.gate.set()
    fetch = prefetcher.submit(gated, ONE)
    assert (prefetcher.wait(fetch) is None) == fails
    del fetch, gated  # and with it its error, whose traceback is of the thread
    thread, gone = prefetcher._worker, weakref.ref(prefetcher)
    del prefetcher
    gc.collect()
    assert gone() is None
    thread.join(SECONDS)
    assert not thread.is_alive()


ENDING = """
import torch
from semkv.runtime.prefetch import Prefetcher

class Busy:
    in_place = True

    def fill(self, rooms, at, index, heads, *, threads=None):
        for _ in range(300):
            torch.randn(300, 300).sort()

prefetcher = Prefetcher(4, ((3, torch.float32), (2, torch.float32)), torch.device("cpu"))
prefetcher.submit(Busy(), lambda: (torch.zeros(1, dtype=torch.int64),) * 2)
"""


def test_a_program_may_end_in_the_midst_of_a_fetch():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=SECONDS * 5)
    assert (done.returncode, done.stderr) == (0, "")


def test_fetches_are_timed_and_too_many_tokens_fail():
    prefetcher = make()
    gated = Gated()
    fetch = prefetcher.submit(gated, indices([(0, 3)]))
    threading.Timer(0.05, gated.gate.set).start()
    check(prefetcher.wait(fetch), fetch, False)
    assert fetch.began < fetch.ended
    prefetcher.release(fetch)
    many = prefetcher.submit(STORED, indices([(0, 1)] * (CAPACITY + 1)))
    assert prefetcher.wait(many) is None
    assert "7 tokens for a buffer of 6" in str(many.error)
    assert prefetcher.nbytes == 2 * CAPACITY * sum(DIMS) * 4
