"""Proof by execution that a recurrent module goes on from its states, and in which pieces it may be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from semkv.capture.recurrent_sites import Site
from semkv.errors import CaptureError
from semkv.ir.recurrence import TOKENS, Pieces

ROWS, LENGTH, MOST = 3, 150, 300
"""Of the sequences that a proof runs over, and the tokens over which graphs are compared: more than the largest has."""

TOLERANCE = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative difference up to which two orders of the same sums count as equal; recurrences are computed in float32 at most."""

SAME = {torch.float64: 1e-11, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative difference up to which two ways of computing one token are one computation."""

OWN_DIFFERENCE = 5e-2
"""Relative difference up to which a model's code for one token may be another computation than its code for several."""

CHANGED = 77
"""From where on the tokens of a second sequence are others."""

SINGLES = ((149, 1), (100, *(1,) * 50))
"""A sequence that is read at once, and then one token at a time, as text is generated."""

SEVERAL = ((70, 80), (2, 66, 82), (64, 64, 22))
"""A sequence that is read in pieces of several tokens, as turns follow each other."""


@dataclass(frozen=True)
class Proof:
    """How a site may be run. tokens: the pieces that it has graphs for; first: whether one token that follows none is a computation of
    its own; reason: what was found, for people."""

    tokens: tuple[int, ...]
    first: bool
    reason: str


def prove(site: Site, tensors: Sequence[Tensor]) -> Proof:
    """How `site` may be run, tried on its inputs `tensors` [ROWS, LENGTH, ...].

    Raises
    ------
    CaptureError: it is not causal, mixes rows, keeps something outside its states, or does not go on from them.
    """
    whole, last = site.run(tensors, None)
    _check_repeats(site, tensors, whole)
    _check_causal(site, tensors, whole)
    _check_rows(site, tensors, [*whole, *last])
    zeros = [form.empty(ROWS, tensors[0].device) for form in site.states]
    if difference(_flat(site.run(tensors, zeros)), [*whole, *last]) > _tolerance(site):
        raise CaptureError(
            f"{_named(site)} does not begin with states of zeros: after zeros it makes something else of a text than without a past"
        )
    first = [x[:, :1] for x in tensors]
    begins = difference(_flat(site.run(first, zeros)), _flat(site.run(first, None)))
    other = begins > SAME.get(tensors[0].dtype, 1e-6)
    if _gap(site, tensors, SEVERAL, whole, last) <= _tolerance(site):
        singles = _gap(site, tensors, SINGLES, whole, last)
        if singles <= _tolerance(site):
            return Proof(TOKENS, other, "its states are carried from piece to piece")
        if singles <= OWN_DIFFERENCE:
            return Proof(
                TOKENS,
                other,
                f"its states are carried from piece to piece; its own code for one token differs from that for several by {singles:.0e}",
            )
        raise CaptureError(
            f"{_named(site)} makes of one token after others something else than of several, by {singles:.1e} of the largest; "
            "expected the same, up to rounding"
        )
    alone = _gap(site, tensors, ((1,) * LENGTH,), whole, last)
    if alone <= _tolerance(site):
        return Proof((1,), other, "runs one token at a time: its code for several does not go on from states")
    raise CaptureError(
        f"{_named(site)} does not go on from its states: a text of {LENGTH} tokens, read one at a time, differs by {alone:.1e} of the "
        "largest from the text read at once"
    )


def check_pieces(site: Site, pieces: Pieces, tensors: Sequence[Tensor]) -> None:
    """Raise `CaptureError` where graphs do not compute what the module does, over `tensors` [ROWS, T, ...] and parts of them."""
    weights = list(site.weights.values())
    whole = site.run(tensors, None)
    _check_equal(site, pieces(tensors, None, weights), whole, f"{tensors[0].shape[1]} tokens", _tolerance(site))
    first = [x[:, :1] for x in tensors]
    _check_equal(
        site, pieces(first, None, weights), site.run(first, None), "one token that follows none", _tolerance(site)
    )
    one = [x[:1, :1] for x in tensors]
    states = [x[:1] for x in whole[1]]
    _check_equal(site, pieces(one, states, weights), site.run(one, states), "one token of one row", _tolerance(site))


def _check_equal(
    site: Site,
    mine: tuple[list[Tensor], list[Tensor]],
    theirs: tuple[list[Tensor], list[Tensor]],
    where: str,
    limit: float,
) -> None:
    found = difference(_flat(mine), _flat(theirs))
    if not found <= limit:
        raise CaptureError(
            f"{_named(site)}: its graphs do not compute what it does over {where}: {found:.1e} of the largest number; its code depends "
            "on values, or on sizes that its graphs do not see"
        )


def difference(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of tensors, each relative to its largest number; infinite where forms differ or a number is none."""
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if a.numel():
            found = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-6))
            worst = max(worst, found if found == found else float("inf"))
    return worst


def _flat(made: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
    return [*made[0], *made[1]]


def _tolerance(site: Site) -> float:
    return max(TOLERANCE.get(form.dtype, 2e-4) for form in (*site.outputs, *site.inputs))


def _named(site: Site) -> str:
    return f"{site.name} ({type(site.module).__name__})"


def _gap(
    site: Site, tensors: Sequence[Tensor], cuts: Sequence[Sequence[int]], whole: list[Tensor], last: list[Tensor]
) -> float:
    """The largest difference from `whole` and `last` when the sequence is read in pieces of these numbers of tokens."""
    worst = 0.0
    for cut in cuts:
        states: list[Tensor] | None = None
        made = []
        for start, end in pairwise((0, *accumulate(cut))):
            outputs, states = site.run([x[:, start:end] for x in tensors], states)
            made.append(outputs)
        assert states is not None
        worst = max(worst, difference([*[torch.cat(parts, 1) for parts in zip(*made)], *states], [*whole, *last]))
    return worst


def _other(x: Tensor) -> Tensor:
    """Other numbers of the same kind: those of the sequence in another order."""
    return x.flip(1)


def _check_repeats(site: Site, tensors: Sequence[Tensor], whole: list[Tensor]) -> None:
    again, _ = site.run(tensors, None)
    if not all(torch.equal(a, b) for a, b in zip(again, whole)):
        raise CaptureError(
            f"{_named(site)} gives something else each time: it draws random numbers, or keeps something outside its states"
        )


def _check_causal(site: Site, tensors: Sequence[Tensor], whole: list[Tensor]) -> None:
    changed = [torch.cat([x[:, :CHANGED], _other(x)[:, CHANGED:]], 1) for x in tensors]
    outputs, _ = site.run(changed, None)
    if difference([x[:, :CHANGED] for x in outputs], [x[:, :CHANGED] for x in whole]) > _tolerance(site):
        raise CaptureError(f"{_named(site)} is not causal: other tokens from {CHANGED} on change those before")


def _check_rows(site: Site, tensors: Sequence[Tensor], expected: list[Tensor]) -> None:
    changed = [torch.cat([x[:1], _other(x[1:2]), x[2:]]) for x in tensors]
    made = _flat(site.run(changed, None))
    if difference([x[0::2] for x in made], [x[0::2] for x in expected]) > _tolerance(site):
        raise CaptureError(f"{_named(site)} mixes rows: other tokens in one change another")


__all__ = ["LENGTH", "MOST", "ROWS", "Proof", "check_pieces", "difference", "prove"]
