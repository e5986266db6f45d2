"""What a mask or bias means, read off the numbers it gives: causal, a window, slopes, or a function of the distance.

Patterns of operators are not looked at: whichever way a model writes its mask, the function from (query position, key
position) to visibility and bias decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.passes.attention_probe import Rejected

HIDDEN = -9000.0
"""Scores at or below this are masked: the fills in use are -inf, a dtype's minimum, -1e9, -65504 and -10000."""

SMALL = 37
"""Tokens of the evaluation in which every operation runs as it is."""

FULL_LIMIT = 1024
"""Longest sequence whose full mask is evaluated where chosen positions do not fit."""

TABLE_LIMIT = 1 << 17
"""Longest table of biases by distance."""

TOLERANCE = 1e-5

ScoreFunction = Callable[[int, "Tensor | None", float], Tensor]
"""(tokens, positions at which they stand or None for 0, 1, ..., raw score) -> softmax input [B, Hq, T, T] float64."""


@dataclass(frozen=True)
class Masking:
    """A score function in the operator's terms; see `semkv.ir.site.AttentionSite`."""

    scale: float
    softcap: float
    window: int
    slopes: Tensor | None = None  # [Hq]
    table: Tensor | None = None  # [Hq, R]
    chunk: int = 0


@dataclass(frozen=True)
class _Sample:
    """Softmax inputs at raw score 0, with the distances of their pairs."""

    length: int
    points: Tensor | None
    base: Tensor  # [Hq, T, T] float64
    distance: Tensor  # [T, T] int64, query position - key position

    @property
    def visible(self) -> Tensor:
        """[Hq, T, T] bool."""
        return self.base > HIDDEN


def classify(score: ScoreFunction, constants: Iterable[int], limit: int | None, *, rows_shift: bool) -> Masking:
    """The meaning of a score function.

    Parameters
    ----------
    score: the function.
    constants: whole numbers that appear in the mask's computation: where a window or a chunk may end.
    limit: positions of the model, None where it declares none.
    rows_shift: whether a constant added to all scores of a row changes nothing; not so where a sink joins the softmax.

    Raises
    ------
    Rejected: not causal, or depends on more than head and distance; the text says how.
    """
    constants = sorted({c for c in constants if 2 <= c < (limit or 1 << 30)})
    samples = [_take(score, SMALL if limit is None else min(SMALL, limit), None)]
    samples += _far_samples(score, constants, limit)
    chunk = _chunk(samples, constants)
    window = chunk or _window(samples, constants)
    scale, softcap = _slope_of_scores(score, samples[-1])
    slopes, table = _bias(score, samples, window, limit, rows_shift=rows_shift)
    return Masking(scale, softcap, window, slopes, table, chunk)


def _take(score: ScoreFunction, length: int, points: Tensor | None) -> _Sample:
    base = score(length, points, 0.0)
    if base.shape[0] > 1 and not torch.equal(base[0], base[-1]):
        raise Rejected("its mask differs between the rows of a batch")
    if torch.isnan(base).any():
        raise Rejected("its mask gives NaN")
    places = torch.arange(length, dtype=torch.int64, device="cpu") if points is None else points
    return _Sample(length, points, base[0], places[:, None] - places[None, :])


def _far_samples(score: ScoreFunction, constants: list[int], limit: int | None) -> list[_Sample]:
    """Evaluations around each constant: at chosen positions where the graph allows that, of the whole mask else."""
    places = set(range(9)) | {37, 101, 255}
    for constant in constants:
        places |= {*range(constant - 2, constant + 4), *range(2 * constant - 1, 2 * constant + 3), constant + 11}
    highest = limit or max(places) + 1
    chosen = torch.tensor(sorted(p for p in places if 0 <= p < highest), dtype=torch.int64, device="cpu")
    try:
        return [_take(score, len(chosen), chosen)]
    except (Rejected, RuntimeError, IndexError) as error:
        reason = error
    lengths = sorted({min(c + 13, highest) for c in constants if c > SMALL - 13} | {min(101, highest)})
    if lengths and lengths[-1] > FULL_LIMIT:
        raise Rejected(f"its mask cannot be evaluated at {lengths[-1]} tokens: {reason}")
    try:
        return [_take(score, length, None) for length in lengths]
    except (RuntimeError, IndexError) as error:
        raise Rejected(f"its mask cannot be evaluated at {lengths} tokens: {error}") from reason


def _window(samples: list[_Sample], constants: list[int]) -> int:
    """The window in tokens, 0 where all of the past is seen."""
    hidden_from = math.inf
    seen = -1
    for sample in samples:
        visible = sample.visible
        if not torch.equal(visible, visible[:1].expand_as(visible)):
            raise Rejected("its mask differs between heads")
        shown = visible[0]
        if bool(shown[sample.distance < 0].any()):
            raise Rejected("its mask lets a token see later ones: the attention is not causal")
        if not bool(shown.diagonal().all()):
            raise Rejected("its mask hides a token from itself")
        past_hidden = sample.distance[(~shown) & (sample.distance >= 0)]
        if past_hidden.numel():
            hidden_from = min(hidden_from, int(past_hidden.min()))
        seen = max(seen, int(sample.distance[shown].max()))
    if hidden_from is math.inf or hidden_from == math.inf:
        return 0
    window = int(hidden_from)
    for sample in samples:
        expected = (sample.distance >= 0) & (sample.distance < window)
        if not torch.equal(sample.visible[0], expected):
            raise Rejected(
                f"its mask is neither causal nor a sliding window: distance {window} is hidden somewhere, but not each "
                f"up to {window - 1} is seen and each from {window} on is hidden (chunks, blocks or a prefix)"
            )
    if seen != window - 1:
        raise Rejected(f"its mask hides distance {window} and shows {seen}; where the window ends could not be found")
    return window


def _chunk(samples: list[_Sample], constants: list[int]) -> int:
    """The chunk in tokens, where a token sees those of its own chunk up to itself; 0 where no constant is one."""
    for chunk in constants:
        shown = False
        for sample in samples:
            places = (
                torch.arange(sample.length, dtype=torch.int64, device="cpu") if sample.points is None else sample.points
            )
            same = places[:, None] // chunk == places[None, :] // chunk
            if not torch.equal(sample.visible, (same & (sample.distance >= 0)).expand_as(sample.visible)):
                break
            shown |= not bool(same.all())
        else:
            if shown:
                return chunk
    return 0


def _slope_of_scores(score: ScoreFunction, sample: _Sample) -> tuple[float, float]:
    """Scale and soft-cap: how the softmax input follows the raw score where it is visible."""
    visible = sample.visible

    def change(raw: float) -> Tensor:
        value = score(sample.length, sample.points, raw)[0] - sample.base
        return value[visible]

    one = change(1.0)
    uniform = bool((one - one[0]).abs().max() <= 1e-9 * one[0].abs())
    if not uniform or float(one[0]) == 0.0:
        raise Rejected(
            "its scores are scaled by more than one number (per head or per token); fold that into the queries"
        )
    linear = all(torch.allclose(change(raw), raw * one, rtol=1e-7, atol=1e-12) for raw in (-3.0, 500.0))
    if linear:
        large = 2.0**20  # so that the bias that is added takes no digits of the scale
        return _tidy(float(change(large).median()) / large), 0.0
    cap = float(change(1e9).median() - change(-1e9).median()) / 2
    if not math.isfinite(cap) or cap <= 0:
        raise Rejected("its scores pass a function that is neither linear nor c * tanh(score / c)")
    cap = _tidy(cap)
    ratio = float(one.median()) / cap
    scale = _tidy(cap * math.atanh(ratio))
    for raw in (-0.7, 3.0, 40.0):
        expected = cap * math.tanh(raw * scale / cap)
        if not torch.allclose(change(raw), torch.full_like(one, expected), rtol=1e-6, atol=1e-9):
            raise Rejected("its scores pass a function that is neither linear nor c * tanh(score / c)")
    return scale, cap


def _tidy(number: float) -> float:
    """The number without the last bits that probing adds: the nearest short decimal where one is that near."""
    short = float(f"{number:.12g}")
    root = 1.0 / number**2 if number else 0.0
    if abs(root - round(root)) < 1e-9 * max(root, 1.0) and round(root) > 0:
        exact = 1.0 / math.sqrt(round(root))
        if abs(exact - number) <= 1e-12 * abs(number):
            return exact
    return short if abs(short - number) <= 4e-16 * abs(number) else number


def _bias(
    score: ScoreFunction, samples: list[_Sample], window: int, limit: int | None, *, rows_shift: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Slopes [Hq] or table [Hq, R] of the additive bias; (None, None) where there is none."""
    relative = [_relative(sample, rows_shift) for sample in samples]
    if all(bool((bias == 0).all()) for bias in relative):
        return None, None
    for sample, bias in zip(samples, relative):
        _check_by_distance(sample, bias)
    slopes = _slopes(samples, relative)
    if slopes is not None:
        return slopes, None
    return None, _table(score, samples[-1], window, limit, rows_shift)


def _relative(sample: _Sample, rows_shift: bool) -> Tensor:
    """The bias [Hq, T, T] at visible pairs, 0 elsewhere; relative to that of distance 0 where this changes nothing."""
    bias = sample.base
    if rows_shift:
        bias = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
    return torch.where(sample.visible, bias, torch.zeros_like(bias))


def _check_by_distance(sample: _Sample, bias: Tensor) -> None:
    """Raise where two pairs of one distance have different biases."""
    distances = sample.distance[sample.visible[0]]
    values = bias[:, sample.visible[0]]
    order = distances.argsort()
    distances, values = distances[order], values[:, order]
    same = distances[1:] == distances[:-1]
    gap = (values[:, 1:] - values[:, :-1]).abs()[:, same]
    scale = max(1.0, float(values.abs().max()))
    if gap.numel() and float(gap.max()) > TOLERANCE * scale:
        raise Rejected("its additive bias depends on more than head and distance")


def _slopes(samples: list[_Sample], relative: list[Tensor]) -> Tensor | None:
    """Slopes of a bias -slope * distance; None where it is no such line."""
    first, bias = samples[0], relative[0]
    if first.length < 2 or not bool(first.visible[0, 1, 0]):
        return None
    slopes = -bias[:, 1, 0]
    for sample, values in zip(samples, relative):
        expected = -slopes[:, None, None] * sample.distance
        expected = torch.where(sample.visible, expected, torch.zeros_like(expected))
        scale = max(1.0, float(expected.abs().max()))
        if float((expected - values).abs().max()) > TOLERANCE * scale:
            return None
    return slopes


def _table(score: ScoreFunction, sample: _Sample, window: int, limit: int | None, rows_shift: bool) -> Tensor:
    """The bias at every distance 0 to R - 1, cut where it stays constant."""
    reach = min(window or limit or 4096, TABLE_LIMIT)
    width = math.isqrt(reach) + 1
    if sample.points is None:
        length = min(reach, FULL_LIMIT)
        whole = _take(score, length, None)
        table = _relative(whole, rows_shift)[:, -1].flip(-1)
        if length < reach and not bool((table[:, -64:] == table[:, -1:]).all()):
            raise Rejected(f"its bias by distance cannot be evaluated beyond {length} tokens")
    else:
        # Differences between one dense and one strided set of positions cover every distance below width squared.
        places = torch.tensor(
            sorted({*range(width), *range(width - 1, reach + width, width), reach - 1}), dtype=torch.int64, device="cpu"
        )
        places = places[places < (limit or reach + width)]
        sparse = _take(score, len(places), places)
        values = _relative(sparse, rows_shift)
        table = values.new_zeros(values.shape[0], reach)
        filled = torch.zeros(reach, dtype=torch.bool, device="cpu")
        inside = sparse.visible[0] & (sparse.distance < reach)
        table[:, sparse.distance[inside]] = values[:, inside]
        filled[sparse.distance[inside]] = True
        if not bool(filled.all()):
            raise Rejected("its bias by distance could not be evaluated at every distance")
    changes = (table != table[:, -1:]).any(0).nonzero()
    end = int(changes[-1]) + 2 if changes.numel() else 1
    return table[:, :end].contiguous()
