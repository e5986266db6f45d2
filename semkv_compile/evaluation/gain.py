"""Recovered gain: how much of what a long context gives to ordinary text survives in a memory."""

from __future__ import annotations

from collections.abc import Sequence

from semkv.evaluation.schema import Interval, Recovered, Row
from semkv.evaluation.statistics import ratio_estimate

FAR_NATS = 1.0
"""A token is far where the full cache gains more than this over first and recent tokens alone."""
WINDOW = "streaming_llm"
"""The method that first and recent tokens alone are: what its budget holds of them."""

Tokens = list[tuple[int, float, float]]
"""Context, what the method gains, and what the full cache gains, in nats over the window, of each token."""


def recovered(rows: Sequence[Row], full: Sequence[Row], window: Sequence[Row]) -> Recovered | None:
    """(method - window) / (full - window), as log-likelihood of the same tokens: over all of them and over the far ones.

    `rows` are of one method at one budget, `window` of `WINDOW` at the same budget, `full` of the whole cache. 1 is the full cache, 0
    what the window knows anyway. None where they share no token, or tokens are not told apart (rows from before they were).
    """
    found = gains(rows, full, window)
    if not found or sum(whole for _, _, whole in found) <= 0:
        return None
    far = [one for one in found if one[2] > FAR_NATS]
    return Recovered(every=_ratio(found), far=_ratio(far) if far else None, tokens=len(found), far_tokens=len(far))


def gain_change(
    rows: Sequence[Row], base: Sequence[Row], full: Sequence[Row], window: Sequence[Row], *, far: bool = False
) -> Interval | None:
    """The gain of `rows` less the gain of `base` at the same budget, on the tokens that both predicted; `far`: on far ones alone.

    None where they share no such token, or the full cache gains nothing over the window.
    """
    mine, theirs = gains(rows, full, window), gains(base, full, window)
    shared = {one[0] for one in mine} & {one[0] for one in theirs}
    pairs = [
        (context, a - b, whole)
        for (context, a, whole), (_, b, _) in zip(
            *([one for one in side if one[0] in shared] for side in (mine, theirs)), strict=True
        )
        if not far or whole > FAR_NATS
    ]
    return _ratio(pairs) if pairs and sum(whole for _, _, whole in pairs) > 0 else None


def gains(rows: Sequence[Row], full: Sequence[Row], window: Sequence[Row]) -> Tokens:
    """Of every token that all three predicted."""
    theirs, least = ({row.context: row for row in given} for given in (full, window))
    found: Tokens = []
    for row in rows:
        if row.context not in theirs or row.context not in least:
            continue
        for mine, whole, near in zip(row.answers, theirs[row.context].answers, least[row.context].answers):
            if mine.token_nats is None or whole.token_nats is None or near.token_nats is None:
                continue
            for a, b, c in zip(mine.token_nats, whole.token_nats, near.token_nats):
                found.append((row.context, c - a, c - b))
    return found


def _ratio(tokens: Tokens) -> Interval:
    contexts, mine, whole = zip(*tokens)
    return Interval.of(ratio_estimate(mine, whole, contexts))
