"""Every option of every method says what it may be, and refuses everything else before any work."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest

from semkv.errors import ConfigError
from semkv.methods import METHODS, find_method
from semkv.methods.base import _bounds
from semkv.methods.options import Allowed

NUMBERS = [
    (name, field.name)
    for name, method in METHODS.items()
    for field in fields(method)
    if get_type_hints(method)[field.name] in (int, float)
]
SHARES = [(name, option) for name, option in NUMBERS if option.endswith("_share")]


def said(method, option, value):
    return rf"^option '{option}' of method '{method}' is {value!r}; expected ".replace("(", r"\(").replace(".", r"\.")


@pytest.mark.parametrize(("method", "option"), NUMBERS)
def test_numbers_have_bounds(method, option):
    kind = METHODS[method]
    assert _bounds(kind)[option](getattr(kind(), option))
    value = -1 if get_type_hints(kind)[option] is int else -1.0
    with pytest.raises(ConfigError, match=said(method, option, value)):
        kind(**{option: value})
    with pytest.raises(ConfigError, match=rf"^option '{option}' of method '{method}' is {value}; expected "):
        find_method(method, {option: value})


@pytest.mark.parametrize(("method", "option"), SHARES)
@pytest.mark.parametrize("value", [0.0, -1.0, 1.01, 7.0, float("nan"), "half"])
def test_shares_are_shares(method, option, value):
    kind = METHODS[method]
    if value == 0 and getattr(kind(), option) == 0:  # which leaves the share to the budget
        return
    with pytest.raises(
        ConfigError, match=said(method, option, value) + r"a share in \(0, 1\](, or 0 for one by the budget)?$"
    ):
        kind(**{option: value})


@pytest.mark.parametrize(
    "method", ["quest", "shadowkv", "infllm", "clusterkv", "sekv", "sentencekv", "sketch", "mixed"]
)
def test_a_whole_share_is_one(method):
    assert find_method(method, {"fixed_share": 1.0}).fixed_share == 1


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("sekv", {"alpha": -1.0}, "option 'alpha' of method 'sekv' is -1.0; expected a number of at least 0"),
        ("sekv", {"bits": 6}, "option 'bits' of method 'sekv' is 6; expected 4, 8 or 16"),
        ("quest", {"page": 0}, "option 'page' of method 'quest' is 0; expected at least 1 token"),
        ("snapkv", {"window": 65}, "option 'window' of method 'snapkv' is 65; expected 1 to 64 queries"),
        ("cake", {"kernel": 4}, "option 'kernel' of method 'cake' is 4; expected an odd width"),
        ("heterocache", {"pool": -3}, "option 'pool' of method 'heterocache' is -3; expected an odd width"),
        ("heterocache", {"tau_drift": 1.5}, r"is 1\.5; expected an overlap in \(0, 1\], or 0 for the profile's own"),
        ("mixed", {"retrieves": 0.0}, r"option 'retrieves' of method 'mixed' is 0\.0; expected a share in \(0, 1\]"),
        (
            "sekv",
            {"router": "oracle", "forms": "factored"},
            "option 'forms' of method 'sekv' is 'factored'; expected 'auto', 'raw' or 'int8' with the router 'oracle'",
        ),
    ],
)
def test_values_out_of_bounds_are_named(method, options, message):
    with pytest.raises(ConfigError, match=message):
        METHODS[method](**options)


def test_what_cannot_be_compared_is_not_allowed():
    assert not Allowed(lambda x: x > 0, "a positive number")(None)
