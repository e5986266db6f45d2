"""The profile of a real model that comes with the tree."""

from __future__ import annotations

from pathlib import Path

from semkv.profiles.schema import Profile

FOLDER = Path(__file__).parents[2] / "profiles" / "smollm2_135m"


def test_it_is_small_and_whole():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10e6
    profile = Profile.load(FOLDER)
    assert [name for name, part in profile.info if part is None] == []
    assert profile.info.model.vocab_size == 49152
    assert [profile.best_method(budget) for budget in (0.03, 0.05, 0.1)] == ["sketch"] * 3
