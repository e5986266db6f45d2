"""The plan's arithmetic by hand, and its bytes against what the runtime measures of the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import semkv
from semkv import bundled
from semkv.compiler.offload import weight_bytes
from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.planning.decoder import Decoder, LayerCache, decoder_of
from semkv.planning.machine import Machine
from semkv.planning.plan import UNFOLDED_SHARE, WAYS, Estimator, Workload, plan_memory, ways_of

MACHINE = Machine("m", memory=20_000, bandwidth=1000, link=10)
DECODER = Decoder("d", 500, 1000, 900, 0, 0.0, (LayerCache(8, 1, 4, 4), LayerCache(8, 1, 4, 4, window=10)), 2, 4096)
WORK = Workload(100, rows=2, budget=0.2, form="raw", overlap=0.5, runtime=50)


def ways(workload: Workload, decoder: Decoder = DECODER, machine: Machine = MACHINE) -> dict:
    return {way.name: way for way in plan_memory(decoder, machine, workload).ways}


def test_ways_by_hand():
    found = ways(WORK)
    window, token = 10 * 16, 16
    assert list(found) == list(WAYS)
    full, offload, budget = (found[name] for name in WAYS[:3])
    assert full.device == 1050 + 2 * (window + 100 * token)
    assert (full.host, full.moved, full.read) == (0, 0, 900 + 2 * (window + 100 * token))
    assert full.device_seconds == full.read / 1000 == full.floor_seconds
    assert offload.host == offload.moved == 2 * 100 * token
    assert offload.floor_seconds == offload.moved / 10 > offload.device_seconds
    assert budget.device == 1050 + 2 * (window + 20 * token)
    assert budget.host == 2 * 100 * token
    assert budget.moved == 2 * (1 - 0.5) * UNFOLDED_SHARE * 20 * token
    assert budget.read == 900 + 2 * (window + 20 * token)


def test_what_fits_is_the_last_that_does():
    for name, way in ways(WORK).items():
        estimator = Estimator(DECODER, MACHINE, WORK)
        assert estimator.fits(name, way.longest, WORK.rows)
        assert not estimator.fits(name, way.longest + 1, WORK.rows)
        assert estimator.fits(name, WORK.tokens, way.most_rows)
        assert not estimator.fits(name, WORK.tokens, way.most_rows + 1)
        assert way.fits == (way.longest >= WORK.tokens) == (way.most_rows >= WORK.rows)
    by_hand = (MACHINE.memory - 1050 - 2 * 160) // (2 * 16)
    assert ways(WORK)["full"].longest == by_hand


def test_host_memory_bounds_what_waits_there():
    bounded = ways(replace(WORK, host=2 * 100 * 16))
    assert {bounded[name].longest for name in ("budget", "full-offload")} == {100}
    assert ways(replace(WORK, host=2 * 100 * 16 - 1))["budget"].fits is False


def test_a_machine_that_does_not_hold_the_weights():
    plan = plan_memory(DECODER, replace(MACHINE, memory=900), WORK)
    assert [(way.fits, way.longest, way.most_rows) for way in plan.ways] == [(False, 0, 0)] * 4
    assert plan.thresholds == ()


def test_thresholds_step_down_to_the_budget():
    many = replace(DECODER, layers=(LayerCache(8, 1, 4, 4),) * 4)
    plan = plan_memory(many, MACHINE, replace(WORK, tokens=40, rows=1))
    assert len(plan.thresholds) == 5
    assert list(plan.thresholds) == sorted(plan.thresholds)
    progressive = plan.ways[-1]
    assert progressive.longest == plan.thresholds[-1]
    estimator = Estimator(many, MACHINE, replace(WORK, rows=1))
    for layers, limit in enumerate(plan.thresholds):
        assert estimator.bytes_of("progressive", limit, 1).layers == layers
    on_device = estimator.bytes_of("progressive", 1, 1)
    assert (on_device.moved, on_device.host) == (0, 0)


def test_ways_that_a_workload_has():
    assert ways_of(Workload(10)) == WAYS[:2]
    assert ways_of(replace(WORK, form="none")) == WAYS[:3]
    dropped = ways(replace(WORK, form="none"))["budget"]
    assert (dropped.host, dropped.moved) == (0, 0)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"tokens": 0}, ConfigError, "context 0 and batch 2: expected at least one token"),
        ({"overlap": 1.5}, ConfigError, r"overlap 1.5: expected a share in \[0, 1\]"),
        ({"form": "zip"}, ConfigError, "form 'zip' is not one of int8, raw, none"),
        ({"budget": 1.5}, BudgetError, "a fraction of the full KV must lie in"),
    ],
)
def test_refusals(change, error, said):
    with pytest.raises(error, match=said):
        replace(WORK, **change)


def test_nothing_to_compress():
    windowed = replace(DECODER, layers=DECODER.layers[1:])
    with pytest.raises(ConfigError, match="every layer keeps a sliding window only"):
        plan_memory(windowed, MACHINE, WORK)
    assert ways(replace(WORK, budget=None), windowed)["full"].device == 1050 + 2 * 160


GRAIN = 16 + 8
"""Tokens per KV head and layer that stay free because a page of Quest's, or one of the exact tokens, does not fit."""


# -- the bundled model, measured -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full():
    return semkv.compile(bundled.load()[0])


@pytest.fixture(scope="module")
def decoder(full):
    return decoder_of(full.config, dtype="float32")


@pytest.fixture(scope="module")
def records(full):
    ids = torch.randint(5, 600, (1, 1024), generator=torch.Generator().manual_seed(0))
    return {n: full.prefill_record(ids[:, :n]) for n in (512, 1024)}


def kept(decoder, tokens: int, budget, way: str, **options):
    """Predicted bytes of the KV alone."""
    estimator = Estimator(decoder, MACHINE, Workload(tokens, budget=budget, runtime=0, **options))
    found = estimator.bytes_of(way, tokens, 1)
    return found.device - decoder.weights, found.host, found.moved


def test_weights_are_those_of_the_program(full, decoder):
    # The program has the rotary frequencies beside the model's parameters.
    assert 0 <= weight_bytes(full.program) - decoder.weights <= 1024


@pytest.mark.parametrize("tokens", [512, 1024])
def test_full_bytes_are_measured_ones(full, decoder, records, tokens):
    """Beside keys and values, a state holds 4 bytes of position per token and layer: under half a percent here."""
    device, _, _ = kept(decoder, tokens, None, "full")
    measured = full.compress(records[tokens]).nbytes["device"]
    assert device == full.compress(records[tokens]).full_bytes
    assert device <= measured <= 1.005 * device


@pytest.mark.parametrize("tokens", [512, 1024])
@pytest.mark.parametrize("budget", [0.15, 0.3, 128])
def test_bytes_of_a_budget_are_measured_ones(full, decoder, records, tokens, budget):
    """The device holds at most the budget, and leaves less of it than the pages that would not fit. Folded tokens are all but the
    exact ones, at most half of the budget, plus tables. At least half of the budget is for unfolded tokens and all of it at most,
    so a step moves, at the overlap that was measured, once to twice what is predicted, but for those pages."""
    compiled = full.with_method("quest", budget, config=CompileConfig(floor=0))
    state = compiled.compress(records[tokens])
    for token in range(4):
        compiled.extend(state, torch.tensor([[7 + token]]))
    now, measured, stats = state.lengths[0], state.nbytes, state.stats
    device, host, moved = kept(decoder, now, budget, "budget", overlap=stats.overlap)
    layers = decoder.layers
    assert device - GRAIN * sum(x.exact_bytes(4) for x in layers) <= measured["peak"] <= device
    exact = host * (budget if isinstance(budget, float) else budget / now) / 2
    assert host - exact <= measured["host"] <= 1.02 * host
    assert moved - GRAIN * sum(x.waiting_bytes("int8", 4) for x in layers) <= stats.moved_bytes_per_step <= 2 * moved


@pytest.mark.parametrize("budget", [0.3, 128])
def test_thresholds_are_those_of_the_runtime(full, decoder, budget):
    settings = CompileConfig(floor=0, offload="progressive", device_memory="24MB", rows=2)
    placed = full.with_method("quest", budget, config=settings).placement
    weights = weight_bytes(full.program)
    machine = replace(MACHINE, memory=settings.device_memory)
    plan = plan_memory(replace(decoder, weights=weights), machine, Workload(64, rows=2, budget=budget))
    assert plan.thresholds == placed.thresholds
    assert len(set(plan.thresholds)) > 1
