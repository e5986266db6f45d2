"""How many units of text fill a length: a search that tokenises a handful of candidates."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], low: int, guess: int, high: int | None = None) -> int | None:
    """The largest n from `low` to `high` with fits(n); None where not even `low` fits.

    `fits` is true up to some n and false beyond it. The search gallops from `guess`, so that a good guess costs few
    calls. Where `fits` is not quite monotone the answer is still one that fits.
    """
    if not fits(low):
        return None
    good, bad = low, None if high is None else high + 1
    candidate = max(low, guess if high is None else min(guess, high))
    step = max(1, candidate // 64)
    while bad is None or bad - good > 1:
        if candidate <= good or (bad is not None and candidate >= bad):
            candidate = good + (step if bad is None else (bad - good) // 2)
        if fits(candidate):
            good = candidate
            candidate = good + step
        else:
            bad = candidate
            candidate = bad - step
        step *= 2
    return good
