"""The memory step: what is alive in a graph, and the section against the model's own facts."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx

from semkv.profiles.calibration.measure import Subject, run_measure
from semkv.profiles.calibration.memory import LiveBytes, Memory, working_bytes
from semkv.profiles.calibration.steps import with_section
from semkv.profiles.schema import MemoryModel, Profile, ProfileInfo


class Chain(torch.nn.Module):
    """Two values of n bytes are alive, then three, then what a view shares with its base counts once."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        one = x + self.weight
        two = one * 2
        three = one - two
        return three.view(8, 8)


def test_the_most_that_is_alive_at_once():
    body = fx.symbolic_trace(Chain())
    live = LiveBytes(SimpleNamespace(body=body), None)
    live.run(torch.zeros(64))
    assert live.peak == 3 * 64 * 4


def measured(subject):
    return run_measure(Memory(subject), identity="", path=None, report=lambda *_: None)


def test_working_memory_grows_with_the_sequence(program):
    few, many = (working_bytes(program, torch.arange(n) % 40) for n in (10, 80))
    assert many == pytest.approx(8 * few, rel=0.3)
    # At least a layer's hidden states, queries, keys and values.
    assert many >= 80 * 4 * (32 + 64 + 2 * 32)


def test_the_section_is_of_the_model(subject, model, measure_settings):
    settings = measure_settings.model_copy(update={"device_memory": 2_000_000, "memory_budget": 64, "memory_rows": 3})
    outcome = measured(Subject(subject.program, subject.data, settings))
    made = outcome.section
    assert made.parameter_bytes >= sum(p.numel() * 4 for p in model.parameters())
    assert made.parameter_bytes <= 1.05 * sum(p.numel() * 4 for p in model.parameters())  # and the tables of positions
    assert made.token_bytes == (2 * 32 * 4,) * 2
    assert (made.group_size, made.tokens, made.rows, made.budget) == (2, 108, 3, 64)
    assert made.decode_bytes < made.prefill_bytes <= made.runtime_bytes
    assert made.retrieval_token_bytes == 0
    limit = made.thresholds[1]
    demand = made.demand
    assert demand.device_bytes(limit, 1) <= 2_000_000 < demand.device_bytes(limit + 1, 1)
    assert f"holds all of {made.thresholds[0]} tokens" in outcome.note
    profile = with_section(blank(subject), "memory_model", made, "", {})
    assert MemoryModel.model_validate(profile.info.memory_model.model_dump()) == made


def blank(subject):
    from semkv.profiles.calibration.calibrate import model_facts

    return Profile(ProfileInfo(fingerprint="0" * 16, model=model_facts(subject.program, "tiny")))


def test_a_section_of_another_model_is_refused(subject):
    made = measured(subject).section
    values = made.model_dump() | {"token_bytes": made.token_bytes[:1]}
    other = MemoryModel.measured(**{name: value for name, value in values.items() if name != "thresholds"})
    with pytest.raises(ValueError, match=r"memory_model.token_bytes has 1 entries for 2 KV stores"):
        with_section(blank(subject), "memory_model", other, "", {})


def test_a_device_that_is_too_small_is_said(subject, measure_settings):
    settings = measure_settings.model_copy(update={"device_memory": 1000})
    outcome = measured(Subject(subject.program, subject.data, settings))
    assert outcome.section is None
    assert outcome.note.startswith("device memory of 1,000 bytes: the weights")


def test_it_goes_on_where_it_stopped(subject, tmp_path):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    path = tmp_path / "memory.safetensors"
    with pytest.raises(Stop):
        run_measure(Memory(subject), identity="x", path=path, report=stop, save_seconds=0.0)
    seen = []
    again = run_measure(
        Memory(subject), identity="x", path=path, report=lambda name, done, *_: seen.append(done), save_seconds=0.0
    )
    assert seen == [2]
    assert again.section == measured(subject).section
