"""Clustered intervals against a bootstrap, closed forms and what must not change them."""

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.evaluation.statistics import proportion, quantile, ratio_estimate, student_quantile


def bootstrap_variance(clusters, statistic, rounds=1500, seed=0):
    """Variance of `statistic(list of clusters)` when whole clusters are drawn with replacement: the naive reference."""
    rng = random.Random(seed)
    values = []
    for _ in range(rounds):
        drawn = [clusters[rng.randrange(len(clusters))] for _ in clusters]
        values.append(statistic(drawn))
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def correlated(n_clusters, seed, sizes=(1, 8)):
    """Clusters of (y, x) outcomes whose success rate differs from cluster to cluster."""
    rng = random.Random(seed)
    clusters = []
    for _ in range(n_clusters):
        rate = rng.choice((0.1, 0.6, 0.95))
        size = rng.randint(*sizes)
        clusters.append([(float(rng.random() < rate), float(rng.random() < 0.9)) for _ in range(size)])
    return clusters


def flat(clusters):
    y = [a for cluster in clusters for a, _ in cluster]
    x = [b for cluster in clusters for _, b in cluster]
    names = [i for i, cluster in enumerate(clusters) for _ in cluster]
    return y, x, names


@pytest.mark.parametrize("seed", range(2))
def test_variance_of_a_mean_agrees_with_a_bootstrap_over_contexts(seed):
    clusters = correlated(60, seed)
    y, _, names = flat(clusters)
    estimate = ratio_estimate(y, [1.0] * len(y), names)

    def mean(drawn):
        values = [a for cluster in drawn for a, _ in cluster]
        return sum(values) / len(values)

    assert estimate.value == pytest.approx(mean(clusters))
    assert estimate.variance == pytest.approx(bootstrap_variance(clusters, mean), rel=0.2)


@pytest.mark.parametrize("seed", range(2))
def test_variance_of_a_ratio_agrees_with_a_bootstrap_over_contexts(seed):
    clusters = correlated(60, 100 + seed)
    y, x, names = flat(clusters)
    estimate = ratio_estimate(y, x, names)

    def ratio(drawn):
        top = sum(a for cluster in drawn for a, _ in cluster)
        return top / sum(b for cluster in drawn for _, b in cluster)

    assert estimate.value == pytest.approx(ratio(clusters))
    assert estimate.variance == pytest.approx(bootstrap_variance(clusters, ratio), rel=0.2)


def test_variance_of_a_mean_over_families_agrees_with_a_bootstrap_within_them():
    families = {"a": correlated(40, 1), "b": correlated(50, 2, sizes=(2, 5))}
    y, names, strata = [], [], []
    for family, clusters in families.items():
        values, _, own = flat(clusters)
        y += values
        names += [(family, name) for name in own]
        strata += [family] * len(values)
    estimate = ratio_estimate(y, [1.0] * len(y), names, strata=strata)

    def mean(clusters):
        values = [a for cluster in clusters for a, _ in cluster]
        return sum(values) / len(values)

    expected = sum(bootstrap_variance(clusters, mean) for clusters in families.values()) / 4
    assert estimate.value == pytest.approx(sum(mean(clusters) for clusters in families.values()) / 2)
    assert estimate.variance == pytest.approx(expected, rel=0.2)


def test_one_question_per_context_is_the_textbook_variance():
    outcomes = [True] * 30 + [False] * 20
    estimate = proportion(outcomes, range(50))
    assert estimate.value == 0.6
    assert estimate.variance == pytest.approx(0.6 * 0.4 / 49)


def test_wilson_interval_with_independent_questions():
    # p 0.6, n 50: (centre +- half) of Wilson's interval with n reduced by (z/t)^2 and p(1-p)/variance = 49.
    z, t = NormalDist().inv_cdf(0.975), 2.0095752
    n = 49 * (z / t) ** 2
    centre = (0.6 + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(0.24 / n + z * z / (4 * n * n))
    estimate = proportion([True] * 30 + [False] * 20, range(50))
    assert (estimate.low, estimate.high) == pytest.approx((centre - half, centre + half), rel=1e-6)


def test_questions_that_repeat_their_context_add_no_precision():
    outcomes = [i % 3 == 0 for i in range(60)]
    once = proportion(outcomes, range(60))
    thrice = proportion([o for o in outcomes for _ in range(3)], [i for i in range(60) for _ in range(3)])
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high))
    assert (thrice.samples, thrice.clusters) == (180, 60)
    unclustered = proportion([o for o in outcomes for _ in range(3)], range(180))
    assert unclustered.high - unclustered.low < 0.65 * (thrice.high - thrice.low)


def test_all_right_still_has_an_interval():
    estimate = proportion([True] * 40, [i // 4 for i in range(40)])
    assert estimate.value == estimate.high == 1.0
    assert 0.6 < estimate.low < 0.8  # ten contexts, not forty questions


def test_one_context_gives_a_mean_without_bounds():
    estimate = ratio_estimate([1.0, 0.0], [1.0, 1.0], ["only", "only"])
    assert estimate.value == 0.5
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_nothing_to_divide_by_is_not_a_number():
    assert math.isnan(ratio_estimate([1.0, 0.0], [0.0, 0.0], [0, 1]).value)


def test_no_observations_are_refused():
    with pytest.raises(ValueError, match="expected equal, non-zero lengths, got 0, 0, 0, 0"):
        ratio_estimate([], [], [])


@pytest.mark.parametrize(
    ("df", "expected"),
    [(1, 12.7062047), (2, 4.3026527), (5, 2.5705818), (10, 2.2281389), (49, 2.0095752), (199, 1.9719565)],
)
def test_student_quantile_against_tables(df, expected):
    assert student_quantile(0.975, df) == pytest.approx(expected, abs=1e-6)


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=2, max_size=30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_interval_holds_the_value_stays_in_range_and_ignores_order(clusters, rng):
    pairs = [(outcome, i) for i, cluster in enumerate(clusters) for outcome in cluster]
    estimate = proportion([o for o, _ in pairs], [c for _, c in pairs])
    assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
    assert estimate.low < estimate.high
    rng.shuffle(pairs)
    again = proportion([o for o, _ in pairs], [f"context {c}" for _, c in pairs])
    assert (again.value, again.low, again.high) == pytest.approx((estimate.value, estimate.low, estimate.high))
    opposite = proportion([not o for o, _ in pairs], [c for _, c in pairs])
    assert (1 - opposite.value, 1 - opposite.high, 1 - opposite.low) == pytest.approx(
        (estimate.value, estimate.low, estimate.high), abs=1e-9
    )


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    covered, rounds = 0, 200
    for seed in range(rounds):
        y, _, names = flat(correlated(40, 1000 + seed))
        estimate = proportion(y, names)
        covered += estimate.low <= 0.55 <= estimate.high  # mean of the three rates
    assert 0.91 <= covered / rounds <= 0.985


def test_quantiles_interpolate():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert math.isnan(quantile([], 0.5))
