"""What changes over the steps."""

import pytest

from semkv.errors import ConfigError
from semkv.profiles.calibration import CalibrationSettings
from semkv.profiles.calibration.schedule import budget_weight, plan, rate_factor, stage


@pytest.fixture
def settings():
    return CalibrationSettings(length=1024, max_steps=100, sequences=4, zoom_contexts=2)


def test_only_the_budget_weight_is_annealed_over_the_first_half(settings):
    assert budget_weight(0, settings) == 0.0
    assert budget_weight(25, settings) == pytest.approx(0.05)
    assert budget_weight(50, settings) == budget_weight(99, settings) == pytest.approx(0.1)


def test_the_rate_warms_up_over_a_tenth_and_falls_to_zero(settings):
    factors = [rate_factor(step, settings) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == pytest.approx(1.0)
    assert factors[-1] < 0.001
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_contexts_grow(settings):
    assert settings.lengths == (256, 512, 1024)
    assert [stage(step, settings) for step in (0, 33, 34, 66, 67, 99)] == [0, 0, 1, 1, 2, 2]


def test_every_sequence_of_a_round_is_taken_once(settings):
    steps = list(plan(settings, {256: 4, 512: 4, 1024: 4}))
    assert len(steps) == 100
    for first in range(0, 30, 2):
        taken = [index for _, indices in steps[first : first + 2] for index in indices]
        assert sorted(taken) == [0, 1, 2, 3]
    assert steps == list(plan(settings, {256: 4, 512: 4, 1024: 4}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"length": 8}, r"setting length = 8: .*greater than or equal to 64"),
        ({"learning_rate": 0.0}, r"setting learning_rate = 0\.0"),
        (
            {"typo": 1},
            r"setting typo = 1: there is no such setting; CalibrationSettings has: length, queries, max_steps",
        ),
    ],
)
def test_settings_out_of_range_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        CalibrationSettings.checked(**values)


def test_settings_round_trip():
    settings = CalibrationSettings(length=512, seed=3)
    assert CalibrationSettings.model_validate_json(settings.model_dump_json()) == settings
    assert settings.identity() != CalibrationSettings(length=512, seed=4).identity()
