"""The training of a layer: what it learns to find, when it stops, and rank gates for every rank."""

import pytest
import torch

from semkv.profiles.calibration.contexts import record_of
from semkv.profiles.calibration.interpreter import SiteCall
from semkv.profiles.calibration.metrics import caught_counts, shares
from semkv.profiles.calibration.parameters import RouterParameters
from semkv.profiles.calibration.train import Trainer, budget_weight, rate_factor, train_site
from semkv.runtime.store.segments import Segmentation

N, QUERIES, SPAN = 256, 16, 8


def planted(seed, settings):
    """A layer whose keys are a large part that queries do not see and a small one that they look for: without training, the direction
    of the mean key is that of the large part."""
    generator = torch.Generator().manual_seed(seed)
    tokens = N + QUERIES
    quiet, loud = torch.arange(8), torch.arange(8, 16)
    k = torch.zeros(2, tokens, 16)
    k[..., loud] = 6 * torch.randn(2, tokens, 8, generator=generator)
    topic = torch.randn(2, tokens // SPAN, 8, generator=generator).repeat_interleave(SPAN, 1)
    k[..., quiet] = topic[:, :tokens]
    q = 0.1 * torch.randn(4, tokens, 16, generator=generator)
    wanted = torch.randint(1, 12, (tokens,), generator=generator)
    q[..., quiet] = 3 * k[:, wanted * SPAN][:, :, quiet].repeat_interleave(2, 0)
    v = torch.randn(2, tokens, 16, generator=generator)
    at = torch.arange(N - QUERIES, tokens)
    call = SiteCall(0, q[:, at], k, v, at, None, None, None, 1.0, 0.0, 0)
    starts = torch.arange(SPAN, N - 2 * SPAN, SPAN)
    cut = Segmentation(torch.arange(SPAN), starts, torch.full_like(starts, SPAN), N - 2 * SPAN)
    return record_of(call, N, cut, torch.ones(tokens), settings).to(torch.device("cpu"))


@pytest.fixture(scope="module")
def own(settings):
    return settings.model_copy(
        update={"queries": QUERIES, "max_steps": 60, "evaluate_every": 10, "learning_rate": 2e-2, "summary_bits": 8}
    )


@pytest.fixture
def records(own):
    return [planted(seed, own) for seed in range(6)]


def test_training_finds_what_the_mean_keys_direction_does_not(program, own, records):
    site = program.sites[0]
    made, state = train_site(site, records[:4], records[4:], own)
    best = state["rows"][-1]
    assert best["oracle"] > best["coarse"] + 0.1
    assert best["caught"] > best["coarse"] + 0.05
    assert best["caught"] > state["rows"][0]["caught"]
    parameters = RouterParameters(site, own)
    parameters.load_state_dict(made)
    again = shares([caught_counts(parameters, one, own) for one in records[4:]])
    assert again["caught"] == pytest.approx(best["caught"]), "the best parameters are kept"
    assert best["caught"] == max(row["caught"] for row in state["rows"])


def test_training_stops_when_no_more_is_caught(program, own, records):
    still = own.model_copy(update={"learning_rate": 1e-12, "patience": 2, "evaluate_every": 10})
    _, state = train_site(program.sites[0], records[:2], records[2:3], still)
    assert state["rows"][-1]["step"] == 30, "counted from the middle, when the budget loss has its full weight"


def test_it_is_the_same_every_time(program, own, records):
    short = own.model_copy(update={"max_steps": 6, "evaluate_every": 3})
    one, two = (train_site(program.sites[0], records[:2], records[2:3], short) for _ in range(2))
    assert one[1] == two[1]
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])


def test_rank_gates_are_trained_for_every_rank(program, data, settings, tmp_path):
    """Each of the R components' own gate moves, those beyond the longest span's too (Eq. 14-15)."""
    longer = settings.model_copy(update={"gate_steps": 60, "max_steps": 2, "evaluate_every": 1, "max_rank": 16})
    result = Trainer(program, data, longer, identity="x", work=tmp_path).run()
    for kind in ("key", "value"):
        moved = (result.tensors[f"gates.{kind}.bias"] - 3.0).abs()
        assert moved.shape == (16,)
        assert bool((moved > 1e-3).all())
    assert not list(tmp_path.glob("*.partial"))


def test_only_the_budget_weight_is_annealed_over_the_first_half(settings):
    long = settings.model_copy(update={"max_steps": 100})
    assert budget_weight(0, long) == 0.0
    assert budget_weight(25, long) == pytest.approx(0.5)
    assert budget_weight(50, long) == budget_weight(99, long) == pytest.approx(1.0)


def test_the_rate_warms_up_over_a_tenth_and_falls_to_zero():
    factors = [rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == pytest.approx(1.0)
    assert factors[-1] < 0.001
    assert factors[10:] == sorted(factors[10:], reverse=True)
