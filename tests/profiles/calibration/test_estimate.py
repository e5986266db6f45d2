"""What a run will take: the arithmetic on measured pieces, and a real one, loosely."""

import time
from dataclasses import replace

import pytest

from semkv.profiles.calibration import STEPS, Job, run_steps
from semkv.profiles.calibration import estimate as module
from semkv.profiles.calibration.estimate import Passes, estimate


@pytest.fixture
def job(model, program, settings, measure_settings, measure_data, data):
    return Job(model, "tiny", "", data, settings, measure_data, measure_settings, program=program)


def test_a_pass_grows_with_the_length_and_attention_with_its_square():
    passes = Passes(length=1000, rest=3.0, attention=8.0, look=0.5, decode=0.1)
    assert passes.seconds(1000) == pytest.approx(11.0)
    assert passes.seconds(500) == pytest.approx(1.5 + 2.0)


def test_every_step_is_told(job):
    said = []
    made = estimate(job, STEPS, said.append)
    assert tuple(made.seconds) == STEPS
    assert all(seconds > 0 for seconds in made.seconds.values())
    assert made.peak_bytes > 50 << 20
    assert said == ["a pass over one sample", *STEPS]


def test_more_work_takes_longer(job, measure_settings, settings, monkeypatch):
    """Passes that cost a second each: what follows is counted."""
    call = module._time_passes(job, job.program, time.monotonic)[1]
    fixed = Passes(
        length=measure_settings.length + measure_settings.steps, rest=1.0, attention=0.0, look=0.25, decode=0.0
    )
    monkeypatch.setattr(module, "_time_passes", lambda *_: (fixed, call))
    monkeypatch.setattr(module, "_timed", lambda *_: 0.0)
    monkeypatch.setattr(module, "_head_step", lambda *_: 0.5)
    monkeypatch.setattr(module, "_sekv", lambda *_: (7.0, 0))
    seconds = estimate(job, STEPS).seconds
    samples, held = 4, 2
    assert seconds["taxonomy"] == pytest.approx(samples * 1.25)
    assert seconds["layer-errors"] == pytest.approx(held * 1.25)
    assert seconds["sketch"] == pytest.approx(samples + held + 5 * held * 0.25)
    steps = measure_settings.head_rounds * measure_settings.head_steps
    assert seconds["retrieval-head"] == pytest.approx((samples + held) * 1.25 + samples * steps * 0.5)
    assert seconds["retrieval-heads"] == pytest.approx(6 * measure_settings.length / fixed.length)
    assert seconds["sekv"] == 7.0


def test_the_estimate_is_near_what_it_takes(job, settings):
    """Within a factor of four, on a machine that does other things too; measured on a real model it was within 1.5."""
    longer = replace(job, settings=settings.model_copy(update={"max_steps": 60, "evaluate_every": 60, "patience": 99}))
    steps = ("taxonomy", "sketch", "sekv")
    told = sum(estimate(longer, steps).seconds.values())
    started = time.monotonic()
    run_steps(longer, steps)
    assert told / 4 < time.monotonic() - started < told * 4
