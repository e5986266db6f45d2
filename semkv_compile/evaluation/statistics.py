"""Proportions and their ratios when several answers come from one context.

Questions about one context share its prefill and its compressed memory, so their outcomes are correlated: the context,
not the question, is the unit of sampling. All variances here are linearised (Taylor) variances of a ratio estimator
over clusters, stratified by task family where families are averaged; see Cochran, Sampling Techniques, chapters 6, 11.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its interval.

    value, low, high: in the unit of the data. samples: observations. clusters: contexts they came from.
    variance: of `value`; NaN with a single cluster.
    """

    value: float
    low: float
    high: float
    samples: int
    clusters: int
    variance: float


def student_quantile(probability: float, df: int) -> float:
    """Quantile of Student's t with `df` >= 1 degrees of freedom, `probability` in (0.5, 1).

    Bisection on the exact distribution function for whole degrees of freedom (Abramowitz and Stegun 26.7.3-4).
    """
    if df < 1 or not 0.5 < probability < 1.0:
        raise ValueError(f"student_quantile({probability}, df={df}): expected a probability in (0.5, 1) and df >= 1")
    if df > 400:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 2.0
    while _student_cdf(high, df) < probability:
        high *= 2.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, df: int) -> float:
    """P(T <= t) for t >= 0."""
    theta = math.atan(t / math.sqrt(df))
    cosine, sine = math.cos(theta), math.sin(theta)
    if df % 2:
        term, total = cosine, 0.0
        for k in range(3, df + 1, 2):
            total += term
            term *= cosine * cosine * (k - 1) / k
        mass = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(2, df + 1, 2):
            total += term
            term *= cosine * cosine * (k - 1) / k
        mass = sine * total
    return 0.5 + mass / 2


def ratio_estimate(
    numerator: Sequence[float],
    denominator: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    strata: Sequence[Hashable] | None = None,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """The ratio of two means over the same observations, with a t interval over clusters.

    With `strata` (task families) each mean is the plain mean of the strata's means. NaN where the denominator is 0, and
    an interval of NaN where a stratum has fewer than two clusters. Raises ValueError for no observations or unequal
    lengths.
    """
    n = len(numerator)
    strata = strata if strata is not None else [None] * n
    if n == 0 or not n == len(denominator) == len(clusters) == len(strata):
        raise ValueError(
            f"expected equal, non-zero lengths, got {n}, {len(denominator)}, {len(clusters)}, {len(strata)}"
        )
    sizes: dict[Hashable, int] = defaultdict(int)
    for stratum in strata:
        sizes[stratum] += 1
    weights = [1.0 / (len(sizes) * sizes[stratum]) for stratum in strata]
    top = math.fsum(w * y for w, y in zip(weights, numerator))
    bottom = math.fsum(w * x for w, x in zip(weights, denominator))
    members = {(stratum, cluster) for stratum, cluster in zip(strata, clusters)}
    if bottom == 0.0:
        return Estimate(math.nan, math.nan, math.nan, n, len(members), math.nan)
    value = top / bottom
    # A stratum's means are ratio estimates themselves, as its clusters differ in size: residuals are centred on them.
    offsets: dict[Hashable, float] = defaultdict(float)
    for y, x, stratum in zip(numerator, denominator, strata):
        offsets[stratum] += (y - value * x) / sizes[stratum]
    residuals: dict[Hashable, dict[Hashable, float]] = defaultdict(lambda: defaultdict(float))
    for w, y, x, stratum, cluster in zip(weights, numerator, denominator, strata, clusters):
        residuals[stratum][cluster] += w * (y - value * x - offsets[stratum]) / bottom
    if any(len(totals) < 2 for totals in residuals.values()):
        return Estimate(value, math.nan, math.nan, n, len(members), math.nan)
    variance, freedom = 0.0, 0
    for totals in residuals.values():
        count = len(totals)
        variance += count / (count - 1) * math.fsum(z * z for z in totals.values())
        freedom += count - 1
    half = student_quantile(0.5 + confidence / 2, freedom) * math.sqrt(variance)
    return Estimate(value, value - half, value + half, n, len(members), variance)


def proportion(
    outcomes: Sequence[bool | int | float],
    clusters: Sequence[Hashable],
    *,
    strata: Sequence[Hashable] | None = None,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Share of true outcomes with a clustered Wilson interval, which never leaves [0, 1] nor shrinks to a point.

    The effective sample size is p(1-p) over the clustered variance, at most the number of observations, reduced for few
    clusters by (z/t)^2 (Korn and Graubard 1998); where all outcomes are equal, the number of clusters stands in for it.
    With `strata`, the mean of the strata's shares.
    """
    plain = ratio_estimate(
        [float(y) for y in outcomes], [1.0] * len(outcomes), clusters, strata=strata, confidence=confidence
    )
    p = min(max(plain.value, 0.0), 1.0)
    n_strata = len(set(strata)) if strata is not None else 1
    freedom = max(plain.clusters - n_strata, 1)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    if math.isnan(plain.variance) or not 0.0 < p < 1.0:
        effective = float(plain.clusters)
    else:
        effective = p * (1 - p) / max(plain.variance, p * (1 - p) / plain.samples)
    effective *= min(1.0, (z / student_quantile(0.5 + confidence / 2, freedom)) ** 2)
    centre = (p + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z / (1 + z * z / effective) * math.sqrt(p * (1 - p) / effective + z * z / (4 * effective * effective))
    # At p = 0 and 1 the bounds are exact in theory; rounding must not push the estimate out of its own interval.
    low, high = min(max(centre - half, 0.0), p), max(min(centre + half, 1.0), p)
    return Estimate(p, low, high, plain.samples, plain.clusters, plain.variance)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile (0 to 1) of `values` by linear interpolation; NaN where there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
