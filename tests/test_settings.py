"""Settings that are wrong are refused by one error, which names the setting, the value and what was expected."""

from __future__ import annotations

import pickle

import pytest

from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.evaluation.settings import Grid, Variant, build_variants

GRID = {"variants": ({"method": "full"},), "families": ("single",), "lengths": (256,)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host": "far"}, r"^setting host = 'far': Input should be 'ram' or 'disk'$"),
        ({"page_size": 0}, r"^setting page_size = 0: Input should be greater than or equal to 1$"),
        ({"kv_dtype": "int3"}, r"^setting kv_dtype = 'int3': expected one of float32, float16, bfloat16, float64$"),
        ({"host_memory": "much"}, r"^setting host_memory = 'much': 'much' is no size: expected a number of bytes"),
        ({"pagesize": 8}, r"^setting pagesize = 8: there is no such setting; CompileConfig has: kv_dtype, host"),
    ],
)
def test_compile_config_names_what_is_wrong(values, message):
    with pytest.raises(ConfigError, match=message):
        CompileConfig(**values)
    with pytest.raises(ConfigError, match=message):
        CompileConfig.model_validate(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"page_size": 65}', r"^setting page_size = 65: Input should be less than or equal to 64$"),
        ('{"page', r"^CompileConfig: Invalid JSON: EOF"),
        ("[]", r"^CompileConfig: Input should be an object, got \[\]$"),
    ],
)
def test_json_that_is_no_config_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        CompileConfig.model_validate_json(text)


@pytest.mark.parametrize(
    ("kind", "values", "error", "message"),
    [
        (Variant, {}, ConfigError, r"^setting method of Variant is missing$"),
        (Variant, {"method": "sekv", "label": 3}, ConfigError, r"^setting label = 3: Input should be"),
        (Variant, {"method": "sekv", "budget": 2.0}, BudgetError, r"^budget 2\.0: a fraction of the full KV must lie"),
        (Variant, {"method": "sekv", "bugdet": 0.1}, ConfigError, r"^setting bugdet = 0\.1: .*Variant has: method, bu"),
        (
            Grid,
            GRID | {"samples": 0},
            ConfigError,
            r"^setting samples = 0: Input should be greater than or equal to 1$",
        ),
        (Grid, GRID | {"questions": ("late",)}, ConfigError, r"^setting questions\.0 = 'late': Input should be"),
        (Grid, GRID | {"variants": ({"method": "full", "size": 1},)}, ConfigError, r"^setting size = 1: .*Variant has"),
    ],
)
def test_evaluation_settings_name_what_is_wrong(kind, values, error, message):
    with pytest.raises(error, match=message):
        kind(**values)


def test_variants_are_built_of_sound_budgets():
    with pytest.raises(BudgetError, match=r"^budget 'a tenth': expected a fraction of the full KV in \(0, 1\]"):
        build_variants(["snapkv"], ["a tenth"])
    with pytest.raises(ConfigError, match=r"^setting method = 3: Input should be a valid string$"):
        build_variants([3], [0.1])


def test_settings_are_values():
    config = CompileConfig(page_size=4, host_memory="4GiB", method_options={"sinks": 2})
    assert CompileConfig.model_validate_json(config.model_dump_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.host_memory == 4 << 30
    grid = Grid(**GRID)
    assert Grid.model_validate_json(grid.model_dump_json()) == grid
    assert grid.variants == build_variants(["full"], [])
