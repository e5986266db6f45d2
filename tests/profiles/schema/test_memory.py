"""The memory model against a simulation that counts every layer, and the thresholds that follow from it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from semkv.errors import BudgetError
from semkv.profiles.schema import MemoryModel
from semkv.profiles.schema.memory import UNBOUNDED, MemoryDemand, offloaded_stores, thresholds


def simulated_bytes(demand, tokens, offloaded):
    """Eq. 7 layer by layer and row by row."""
    total = demand.weights + demand.runtime
    budget = demand.budget * tokens if isinstance(demand.budget, float) else min(demand.budget, tokens)
    for _ in range(demand.rows):
        total += demand.staying * tokens
        for number, (waiting, exact) in enumerate(zip(demand.waiting, demand.exact)):
            on_host = number >= len(demand.waiting) - offloaded
            total += 0 if on_host else waiting * tokens
            total += exact * budget if on_host or demand.beside else 0
    return total


@st.composite
def demands(draw):
    exact = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)))
    beside = draw(st.booleans())
    budget = draw(st.one_of(st.integers(1, 60), st.sampled_from([0.0625, 0.125, 0.5, 1.0])))
    return MemoryDemand(
        weights=draw(st.integers(0, 500)),
        runtime=draw(st.integers(0, 200)),
        waiting=tuple(max(1, size // 2) for size in exact) if beside else exact,
        exact=exact,
        budget=budget,
        staying=draw(st.integers(0, 30)),
        rows=draw(st.integers(1, 4)),
        beside=beside,
    )


@given(demands(), st.integers(0, 400), st.integers(0, 5))
def test_bytes_are_those_of_the_simulation(demand, tokens, offloaded):
    offloaded = min(offloaded, len(demand.waiting))
    assert demand.device_bytes(tokens, offloaded) == simulated_bytes(demand, tokens, offloaded)


@given(demands(), st.integers(0, 8000))
@settings(max_examples=50)
def test_thresholds_are_the_longest_sequences_that_fit(demand, device):
    fits = [
        [n for n in range(1, 300) if simulated_bytes(demand, n, i) <= device] for i in range(len(demand.waiting) + 1)
    ]
    longest = [max(found, default=0) for found in fits]
    if not longest[-1]:
        with pytest.raises(
            BudgetError, match=r"device memory of [\d,]+ bytes: the weights .* use a device with more memory"
        ):
            thresholds(demand, device)
        return
    made = thresholds(demand, device)
    assert [min(limit, 299) for limit in made] == longest
    assert list(made) == sorted(made)
    for offloaded, limit in enumerate(made):
        assert demand.device_bytes(limit, offloaded) <= device or not limit
        assert limit == UNBOUNDED or demand.device_bytes(limit + 1, offloaded) > device


@given(demands(), st.integers(500, 20_000), st.integers(100, 5000))
@settings(max_examples=50)
def test_a_full_host_ends_all_sequences(demand, device, host):
    try:
        free = thresholds(demand, device)
    except BudgetError:
        return
    made = thresholds(demand, device, host)
    possible = 0
    for tokens in range(1, 300):
        offloaded = next((i for i, limit in enumerate(free) if tokens <= limit), None)
        if offloaded is not None and demand.host_bytes(tokens, offloaded) <= host:
            possible = tokens
    assert min(made[-1], 299) == possible
    assert list(made) == sorted(made)
    assert all(min(one, possible) == min(other, possible) for one, other in zip(made, free))


@given(demands(), st.integers(500, 20_000), st.integers(1, 1000))
@settings(max_examples=50)
def test_the_fewest_layers_wait(demand, device, tokens):
    """Eq. 8: as many layers on the device as fit."""
    try:
        limits = thresholds(demand, device)
    except BudgetError:
        return
    fitting = [i for i in range(len(demand.waiting) + 1) if simulated_bytes(demand, tokens, i) <= device]
    if fitting:
        assert offloaded_stores(limits, tokens) == fitting[0]
    else:
        with pytest.raises(
            BudgetError, match=rf"a sequence of {tokens} tokens does not fit: .* holds {limits[-1]} tokens"
        ):
            offloaded_stores(limits, tokens)


def test_eq_6_and_7_of_an_8b_model():
    """Llama-3-8B in half precision: 32 layers of 8 KV heads of 128, groups of 4, a retrieval head of one such layer."""
    layer, weights = 4 * 8 * 128, 16_060_000_000
    demand = MemoryDemand(
        weights=weights,
        runtime=int(0.3 * weights),
        waiting=(layer,) * 32,
        exact=(layer,) * 32,
        budget=2048,
        staying=layer // 2 + 4 * layer,
    )
    # 4 R (L + 1/2 + alpha) S H D, and 4 R [(L_gpu + 1/2 + alpha) S + L_cpu B] H D.
    assert demand.device_bytes(10_000, 0) == 1.3 * weights + 4 * 36.5 * 10_000 * 8 * 128
    assert demand.device_bytes(10_000, 3) == 1.3 * weights + 4 * (33.5 * 10_000 + 3 * 2048) * 8 * 128
    limits = thresholds(demand, 24_000_000_000)
    assert len(limits) == 33
    assert limits[0] == int((24_000_000_000 - 1.3 * weights) // (4 * 36.5 * 8 * 128))
    assert limits[32] > 5 * limits[0]


CONSTANTS = {
    "parameter_bytes": 1000,
    "prefill_bytes": 50,
    "decode_bytes": 5,
    "tokens": 16,
    "token_bytes": (8, 8, 8),
    "group_size": 2,
    "device_bytes": 9000,
    "rows": 2,
    "budget": 10,
}


def test_the_section_holds_thresholds_that_follow():
    made = MemoryModel.measured(**CONSTANTS)
    assert made.runtime_bytes == 300
    assert made.thresholds == thresholds(made.demand, 9000)
    assert MemoryModel.model_validate_json(made.model_dump_json()) == made
    busy = MemoryModel.measured(**CONSTANTS | {"prefill_bytes": 4000})
    assert busy.runtime_bytes == 4000
    assert busy.thresholds < made.thresholds
    with pytest.raises(
        ValidationError, match=r"thresholds \(1, 2, 3, 4\) do not follow from the constants, which give"
    ):
        MemoryModel(**CONSTANTS, thresholds=(1, 2, 3, 4))
    with pytest.raises(BudgetError, match=r"device memory of 900 bytes: the weights \(1,000 bytes\)"):
        MemoryModel.measured(**CONSTANTS | {"device_bytes": 900})


def test_tokens_that_change_their_form_are_held_twice():
    with pytest.raises(ValueError, match=r"held beside what was selected"):
        MemoryDemand(weights=0, runtime=0, waiting=(4,), exact=(8,), budget=1)
