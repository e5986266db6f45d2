"""Processes that share work: what each gets, and how an error of one ends all."""

from __future__ import annotations

import os

import pytest
import torch

from semkv.errors import ConfigError, ProcessError
from semkv.io.ranks import ALONE, Ranks, launched, own_device
from tests.processes import in_ranks


def test_one_process_exchanges_nothing():
    seen = []

    def run(item):
        for part in range(item):
            seen.append((item, part))
            yield part

    dealt = ALONE.deal([1, 2], run)
    assert next(dealt) == (1, 0)
    assert seen == [(1, 0)], "results come as they are made"
    assert list(dealt) == [(2, 0), (2, 1)]
    assert ALONE.gather(3) == ALONE.send(3, 0) == [3]
    with launched() as ranks:
        assert ranks is ALONE


def test_items_are_dealt_and_come_in_order_to_all():
    def run(ranks: Ranks):
        dealt = list(ranks.deal(range(5), lambda item: [(item, ranks.rank), torch.tensor(item)]))
        sent = ranks.send({ranks.rank: "x"}, 1)
        return dealt, sent, ranks.from_first(os.getpid), ranks.gather(ranks.rank)

    first, second = in_ranks(run)
    assert first[0] == second[0] == [(i, x) for i in range(5) for x in ((i, i % 2), torch.tensor(i))]
    assert (first[1], second[1]) == ([], [{0: "x"}, {1: "x"}])
    assert first[2] == second[2]
    assert first[3] == second[3] == [0, 1]


def test_an_error_of_one_ends_all():
    """Before an exchange, within dealt work, and after the last exchange of the others."""

    def before(ranks: Ranks):
        if ranks.rank == 1:
            raise FileNotFoundError("no text here")
        return ranks.from_first(lambda: 1)

    def within(ranks: Ranks):
        def run(item):
            if item == 2:
                raise ConfigError("context 2 is too short")
            return [item]

        return list(ranks.deal(range(4), run))

    def after(ranks: Ranks):
        if ranks.rank == 1:
            raise ConfigError("late")

    for run, failed, message in ((before, 1, "no text here"), (within, 0, "context 2 is too"), (after, 1, "late")):
        found = in_ranks(run)
        own, other = found[failed], found[1 - failed]
        assert message in str(own)
        assert not isinstance(own, ProcessError)
        assert isinstance(other, ProcessError)
        assert other.told
        assert str(other).startswith(f"process {failed} of 2 failed: ")
        assert message in str(other)


def test_a_process_that_ends_is_noticed():
    def run(ranks: Ranks):
        if ranks.rank == 1:
            os._exit(1)
        ranks.gather()

    error, nothing = in_ranks(run)
    assert nothing is None
    assert isinstance(error, ProcessError)
    assert not error.told
    assert "another process of this run has ended" in str(error)
    assert "repeat the command to go on" in str(error)


def test_processes_that_differ_are_told_apart():
    found = in_ranks(lambda ranks: ranks.same(ranks.rank // 1, "model"))
    assert "process 1 of 2 has another model than process 0: start all with the same command" in str(found[0])
    assert isinstance(found[1], ProcessError)


def test_each_process_takes_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("cuda", Ranks(5, 8)) == "cuda:1"
    assert own_device("cuda:1", ALONE) == "cuda:1"
    assert own_device("cpu", Ranks(1, 2)) == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda:0: 8 processes take a GPU each, so give --device cuda"):
        own_device("cuda:0", Ranks(5, 8))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"process 6 would take GPU 2, and this machine has 2: start at most 2"):
        own_device("cuda", Ranks(6, 8))


def test_variables_that_are_no_numbers(monkeypatch):
    for name, value in {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"RANK=x, WORLD_SIZE=2, .* do not find each other"), launched():
        pass
