"""Deployments by hand: replicas, hosts, what binds, links and tokens per second."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from semkv.errors import ConfigError
from semkv.planning.decoder import Decoder, LayerCache
from semkv.planning.deployment import MEASURED, Fleet, deploy, slowdown
from semkv.planning.machine import Machine
from semkv.planning.plan import Workload

MACHINE = Machine("m", memory=20_000, bandwidth=1000, link=10)
LAYERS = (LayerCache(8, 1, 4, 4), LayerCache(8, 1, 4, 4, window=10))
DECODER = Decoder("d", 500, 1000, 900, 0, 0.0, LAYERS, 2, 4096, hidden=6)
WORK = Workload(100, budget=0.2, form="raw", overlap=0.5, runtime=50)
ROOT = Path(__file__).parents[2]


def test_as_many_gpus_as_the_users_need():
    """A row takes 160 bytes of windows and 16 a token: 1,760 whole, 480 at 20 tokens, 1,600 of the host; 18,950 are free."""
    full, budget = deploy(DECODER, MACHINE, WORK, Fleet(100, gpus_per_host=2, network=1000))
    assert (full.way, full.replica_gpus, full.gpus, full.hosts) == ("full", 1, 10, 5)  # 10 rows a GPU
    assert (full.capacity, full.served, full.users_per_replica) == (100, 100, 10)
    assert (full.host, full.link, full.peer) == (0, 0, 0)
    assert full.device == 1050 + 10 * 1760
    assert full.step_floor == (900 + 10 * 1760) / 1000
    assert full.step_binds == "device bandwidth"

    assert (budget.needed_gpus, budget.gpus, budget.hosts, budget.capacity) == (3, 3, 2, 117)  # 39 rows a GPU
    assert budget.users_per_replica == 34
    assert budget.device == 1050 + 34 * 480
    assert budget.host == 2 * 34 * 1600
    assert budget.step_floor == 34 * 80 / 10  # half of ten unfolded tokens is new: 80 bytes a row
    assert (budget.step_binds, budget.link) == ("link", 10)
    assert (budget.session, budget.session_seconds) == (480 + 1600, 2.08)
    assert budget.floor_tokens == 100 / 272
    assert budget.estimated_tokens == budget.floor_tokens / MEASURED["sekv"]
    assert budget.estimated_tokens_per_user == 1 / (272 * MEASURED["sekv"])
    assert (full.binds, budget.binds) == ("device memory", "device memory")


def test_a_host_holds_fewer_than_its_gpus():
    fleet = Fleet(100, gpus_per_host=2, host_memory=80_000)  # 50 users
    budget = deploy(DECODER, MACHINE, WORK, fleet)[-1]
    assert (budget.binds, budget.needed_gpus, budget.hosts, budget.users_per_replica) == ("host memory", 4, 2, 25)
    assert budget.host == 80_000
    few = deploy(DECODER, MACHINE, WORK, replace(fleet, gpus=3))[-1]
    assert (few.capacity, few.served, few.needed_gpus) == (50 + 39, 89, 4)
    assert few.users_per_replica == 39  # the second host's one GPU
    dropped = deploy(DECODER, MACHINE, replace(WORK, form="none"), fleet)[-1]
    assert (dropped.host, dropped.link, dropped.binds, dropped.gpus) == (0, 0, "device memory", 3)


def test_thousands_of_gpus():
    found = deploy(DECODER, MACHINE, WORK, Fleet(100_000, gpus=4096))[-1]
    assert (found.hosts, found.capacity, found.served) == (512, 39 * 4096, 100_000)
    assert found.users_per_replica == 25
    assert found.needed_gpus == 2565  # 320 hosts of 8, and 160 users on 5


def test_a_replica_of_several_gpus():
    """800 bytes hold no 1,050 of weights and working memory; two GPUs a compressed row, four a whole one."""
    small = replace(MACHINE, memory=800)
    full, budget = deploy(DECODER, small, WORK, Fleet(3))
    assert (full.replica_gpus, full.gpus, full.capacity) == (4, 12, 3)
    assert (budget.replica_gpus, budget.gpus) == (2, 6)
    assert full.device == round((1050 + 1760) / 4)
    assert full.step_floor == (900 + 1760) / 4000
    assert full.peer == pytest.approx(2 * 2 * 6 * 2 * 2 * 3 / 4 / full.step_floor)
    (only,) = deploy(DECODER, small, WORK, Fleet(3, gpus_per_host=2))  # the whole KV fits no host
    assert only.way == "budget"


@pytest.mark.parametrize(
    ("fleet", "memory", "said"),
    [
        (
            Fleet(1, gpus_per_host=1),
            800,
            r"d: 1 GPU\(s\) of a host, m, do not hold the weights and one user of 100 tokens",
        ),
        (Fleet(1, gpus=1), 800, r"--gpus 1: a replica of d with a user of 100 tokens takes 2"),
        (Fleet(1, host_memory=1599), 20_000, r"--host-memory 1,599: a user of 100 tokens takes 1,600 bytes of a host"),
    ],
)
def test_what_no_deployment_holds(fleet, memory, said):
    with pytest.raises(ConfigError, match=said):
        deploy(DECODER, replace(MACHINE, memory=memory), WORK, fleet)


@pytest.mark.parametrize("name", ["users", "gpus", "gpus_per_host"])
def test_numbers_out_of_range(name):
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} 0: expected a number from 1 to"):
        Fleet(**{"users": 1, name: 0})


def test_estimates_are_those_that_were_measured():
    results = json.loads((ROOT / "benchmarks/results/decode_step.json").read_text())["results"]
    found = {}
    for one in results:
        name, *rest = one["cell"]["name"].split(", ")
        if one["cell"]["tokens"] == 131072 and one["floor_ms"] and rest == ([] if name == "full" else ["95 % overlap"]):
            found[name] = one["median_ms"] / one["floor_ms"]
    assert found.keys() == MEASURED.keys()
    assert {name: round(value, 2) for name, value in found.items()} == MEASURED
    assert slowdown("compresskv", "budget") == (12.47, "compresskv")
    assert slowdown("quest", "budget") == (15.51, "sekv")  # nothing better is known
    assert slowdown("quest", "full") == (2.53, "full")
