"""`auto`, as a method's name: the one that the profile measured to be best."""

from __future__ import annotations

from semkv.errors import ConfigError
from semkv.profiles.schema import Profile

AUTO = "auto"


def measured_best(profile: Profile | None, budget: float | int | None) -> str:
    """The method that stands for `auto` at `budget`; a number of tokens takes what is best over all measured fractions.

    Raises ConfigError: there is no budget, or no profile whose methods were measured.
    """
    if profile is None:
        raise ConfigError("method 'auto' needs a profile whose methods were measured: make one with semkv-profile")
    if budget is None:
        raise ConfigError("method 'auto' chooses for a budget: pass budget=0.1 for example, or method='full'")
    if not profile.info.choices:
        raise ConfigError(
            "method 'auto' chooses by measurement and this profile holds none: run `semkv-profile MODEL --steps choice -o PROFILE`"
        )
    return profile.best_method(budget)
