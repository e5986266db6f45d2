"""Contexts in processes: the same rows as in one, errors that come through, and workers that die."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import semkv
from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.evaluation.runner import run_grid
from semkv.evaluation.settings import Grid, Variant
from semkv.evaluation.store import RowStore
from semkv.evaluation.subject import Subject
from semkv.evaluation.workers import check_workers, default_workers, in_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
CPU = torch.device("cpu")


def doubled(item: int):
    yield 2 * item
    yield 2 * item + 1


def test_every_item_is_run_once_by_several_processes():
    def run(item: int):
        time.sleep(0.01)
        for result in doubled(item):
            yield result, os.getpid(), torch.get_num_threads()

    found = list(in_processes(run, range(7), 3))
    assert sorted((item, result) for item, (result, _, _) in found) == [(i, r) for i in range(7) for r in doubled(i)]
    assert len({process for _, (_, process, _) in found}) > 1
    assert os.getpid() not in {process for _, (_, process, _) in found}
    assert {threads for _, (_, _, threads) in found} == {1}


def test_nothing_to_do():
    assert list(in_processes(doubled, [], 2)) == []


@pytest.mark.parametrize(
    ("error", "raised"), [(BudgetError("too small"), BudgetError), (ValueError("odd"), RuntimeError)]
)
def test_an_error_of_a_worker_is_raised(error, raised):
    def run(item: int):
        if item == 2:
            raise error
        yield item

    with pytest.raises(raised, match=str(error)):
        list(in_processes(run, range(4), 2))


def test_a_worker_that_is_killed_is_said():
    def run(item: int):
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item

    with pytest.raises(RuntimeError, match="ended with -9"):
        list(in_processes(run, range(3), 2))


def test_leaving_early_ends_the_workers(tmp_path):
    def run(item: int):
        Path(tmp_path / str(os.getpid())).touch()
        yield item
        time.sleep(60)

    results = in_processes(run, range(2), 2)
    next(results)
    results.close()
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_what_cannot_work_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="workers 0: expected at least 1"):
        check_workers(0, CPU)
    with pytest.raises(ConfigError, match="it is on cuda:0; use 1"):
        check_workers(2, torch.device("cuda:0"))
    check_workers(1, torch.device("cuda:0"))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="on Linux; use 1"):
        check_workers(2, CPU)


def test_small_models_have_a_process_per_thread():
    small = torch.nn.Linear(4, 4)
    assert default_workers(small, CPU) == torch.get_num_threads()
    assert default_workers(small, torch.device("cuda:0")) == 1
    with torch.device("meta"):
        large = torch.nn.Linear(60_000, 10_000)
    assert default_workers(large, CPU) == 1


@pytest.mark.slow
def test_a_grid_gives_the_rows_of_one_process_and_of_one_context_at_a_time():
    model, tokenizer = semkv.bundled.load()
    compiled = semkv.compile(model, semkv.bundled.profile(), method="full", config=CompileConfig(kv_dtype="float16"))
    grid = Grid(
        variants=(Variant(method="full"), Variant(method="sketch", budget=0.2)),
        families=("single", "multi"),
        lengths=(256,),
        samples=2,
        questions_per_context=2,
    )
    stores = []
    for workers, together in ((1, 1), (2, 1), (1, 3)):
        store = RowStore(None)
        run_grid(Subject(compiled, "test"), tokenizer, grid, store, workers=workers, together=together)
        stores.append({key: (row.answers, row.usage) for key, row in store._rows.items()})
    assert stores[0] == stores[1]
    assert stores[0] == stores[2]
    assert len(stores[0]) == 4


def test_refusals_of_several_processes_are_one(lookup, tokenizer):
    grid = Grid(
        variants=(Variant(method="picky", budget=0.5), Variant(method="tail", budget=0.5)),
        families=("single",),
        lengths=(256,),
        samples=24,
        questions_per_context=2,
    )
    refusals, store = [], RowStore(None)
    lookup.log["first"] = []  # no context will do
    run_grid(Subject(lookup, "test"), tokenizer, grid, store, workers=2, refusals=refusals)
    assert [refusal.variant.method for refusal in refusals] == ["picky"]
    assert refusals[0].why.startswith("single, 256 tokens, context 0: "), "the first, whichever process was faster"
    assert len(store._rows) == 12
