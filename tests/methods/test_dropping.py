"""Methods that drop tokens, against the formulas of their papers written as loops."""

from __future__ import annotations

import math

import pytest
import torch

from semkv.errors import ConfigError
from semkv.ir.site import AttentionSite
from semkv.methods import CAKE, H2O, ChunkKV, PyramidKV, find_method
from semkv.methods.cake import LayerPreference, SteadyVotes
from semkv.methods.chunkkv import ChunkVotes
from semkv.methods.h2o import HeavyHitters
from semkv.methods.window_scores import attention_received, observed_mass, observed_weights, pooled
from semkv.runtime.budgets.budget import bounded_shares
from semkv.runtime.prompt.record import RowRecord

SITE = AttentionSite(
    index=0, name="layer", store=0, q_heads=6, kv_heads=3, key_dim=7, value_dim=5, scale=0.4, softcap=3.0
)
OTHER = AttentionSite(index=1, name="next", store=1, q_heads=6, kv_heads=3, key_dim=7, value_dim=5, scale=0.4)


def record(n: int, queries: int | None = None, seed: int = 0) -> RowRecord:
    generator = torch.Generator().manual_seed(seed)
    out = RowRecord(ids=torch.zeros(n, dtype=torch.int64), all_queries=queries is None)
    for site in (SITE, OTHER):
        out.keys[site.store] = torch.randn(3, n, 7, generator=generator)
        out.values[site.store] = torch.randn(3, n, 5, generator=generator)
        out.queries[site.index] = torch.randn(6, n if queries is None else min(n, queries), 7, generator=generator)
    return out


def attention(of: RowRecord, site: AttentionSite, head: int, at: int) -> list[float]:
    """Weights of the query of one query head at one position on the tokens up to it."""
    q, k = of.queries[site.index], of.keys[site.store]
    query = q[head, at - (k.shape[1] - q.shape[1])]
    scores = [float(query @ k[head // site.group_size, j]) * site.scale for j in range(at + 1)]
    if site.softcap:
        scores = [site.softcap * math.tanh(score / site.softcap) for score in scores]
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def variance(values: list[float]) -> float:
    return sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1)


def smoothed(values: list[float], kernel: int) -> list[float]:
    """Average pooling with zeros beyond the ends."""
    half = kernel // 2
    return [sum(values[max(0, j - half) : j + half + 1]) / kernel for j in range(len(values))]


def observed(of: RowRecord, site: AttentionSite, head: int, window: int, tail: int) -> list[list[float]]:
    """[window][n - tail] weights of the last `window` queries."""
    n = of.tokens
    return [attention(of, site, head, n - window + i)[: n - tail] for i in range(window)]


def close(got: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-4, atol=1e-6)


# -- H2O ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 23])
def test_h2o_adds_up_what_all_queries_attend_to(n, monkeypatch):
    of = record(n)
    expected = [[0.0] * n for _ in range(3)]
    for head in range(6):
        for at in range(n):
            for j, weight in enumerate(attention(of, SITE, head, at)):
                expected[head // 2][j] += weight / 2
    close(attention_received(SITE, of), expected)
    monkeypatch.setattr("semkv.methods.window_scores.CHUNK_SCORES", 5 * 6 * n)
    close(attention_received(SITE, of), expected)


def test_scores_of_a_part_are_those_of_its_heads():
    of = record(19)
    part = SITE.part(1, 3, 0.5)
    assert torch.equal(attention_received(part, of), attention_received(SITE, of)[1:])
    assert torch.equal(observed_weights(part, of, 4), observed_weights(SITE, of, 4)[1:])
    for queries in (4, 20):
        torch.testing.assert_close(
            observed_mass(SITE, of, queries), observed_weights(SITE, of, queries).sum(dim=(0, 1, 2))
        )


@pytest.mark.parametrize(
    ("room", "page", "heavy", "places"),
    [
        (48, 8, 0.5, 24),
        (24, 8, 0.5, 8),
        (40, 1, 0.5, 20),
        (33, 1, 0.2, 6),
        (24, 8, 0.99, 16),
    ],
)
def test_h2os_window_has_at_least_a_page(room, page, heavy, places):
    assert HeavyHitters(heavy).places(room, page) == places


# -- the observation window's descendants --------------------------------------------------------------------------------


def test_pooling_keeps_the_shape():
    x = torch.randn(2, 3, 9)
    for pool in ("max", "mean"):
        assert pooled(x, 5, pool).shape == x.shape
        assert torch.allclose(pooled(x, 5, pool)[1, 2], pooled(x[1, 2][None], 5, pool)[0])


@pytest.mark.parametrize("tail", [9, 13])
def test_cakes_indicator_is_mean_plus_variance(tail):
    of, window, gamma = record(41, queries=17), 9, 30.0
    expected = []
    for group in range(3):
        rows = []
        for head in (2 * group, 2 * group + 1):
            weights = observed(of, SITE, head, window, tail)
            columns = list(zip(*weights))
            rows.append(smoothed([mean(list(c)) + gamma * variance(list(c)) for c in columns], 5))
        expected.append([mean(list(pair)) for pair in zip(*rows)])
    close(SteadyVotes(window, 5, "mean", 0, gamma).scores(SITE, of, tail), expected)


def test_cakes_layers_share_by_entropy_and_variance():
    of, window, tau1, tau2 = record(37, queries=20), 8, 1.6, 0.4
    wishes = []
    for site in (SITE, OTHER):
        entropies, changes = [], []
        for head in range(6):
            weights = observed(of, site, head, window, window)
            entropies += [-sum(w * math.log(w) for w in row) for row in weights]
            changes.append(sum(variance(list(column)) for column in zip(*weights)))
        wishes.append(mean(entropies) ** (1 / tau1) * mean(changes) ** (1 / tau2))
    shares = LayerPreference(SteadyVotes(window, 5, "mean", 0, 1.0), tau1, tau2).shares((SITE, OTHER), of, 20.0)
    for share, wish in zip(shares, wishes):
        tokens = window + (20 - window) * 2 * wish / sum(wishes)
        assert share * 40 == pytest.approx(tokens, rel=1e-4)


def test_cake_divides_evenly_where_nothing_lies_before_the_window():
    preference = LayerPreference(SteadyVotes(32, 5, "mean"))
    assert preference.shares((SITE, OTHER), record(20), 10.0) == (0.5, 0.5)
    assert CAKE(adaptive=False).plan.__qualname__ == "CAKE.plan"


@pytest.mark.parametrize(("n", "room"), [(83, 48), (60, 33)])
def test_chunkkv_keeps_whole_chunks_of_the_leading_layer(n, room):
    of, size, window, tail = record(n, queries=12), 7, 4, 8
    weights = [observed(of, SITE, head, window, tail) for head in range(6)]
    votes = [sum(sum(row[j] for row in head) for head in weights) for j in range(n - tail)]
    chunks = [range(start, min(start + size, n - tail)) for start in range(0, n - tail, size)]
    order = sorted(chunks, key=lambda chunk: -sum(votes[j] for j in chunk))
    expected = sorted(j for chunk in order[: (room - tail) // size] for j in chunk)
    keeper = ChunkVotes(window, 1, "max", 8, size, {1: SITE})
    for site in (SITE, OTHER):
        kept, recent = keeper.keep(site, of, room, 1)
        assert recent == n - tail
        assert kept.tolist() == [expected]
    own, _ = ChunkVotes(window, 1, "max", 8, size).keep(OTHER, of, room, 1)
    assert own.tolist() != [expected]


def test_chunkkvs_layers_share_in_groups(double_found):
    leaders = ChunkKV(reuse=2).components(double_found, None).keeper.leaders
    stores = [store.store for store in double_found.stores]
    assert [leaders[store].store for store in stores] == [stores[place - place % 2] for place in range(len(stores))]
    alone = ChunkKV(reuse=1).components(double_found, None).keeper.leaders
    assert all(site.store == store for store, site in alone.items())


@pytest.fixture(scope="module")
def double_found(decoder_program):
    return decoder_program


@pytest.mark.parametrize("beta", [1.0, 5.0, 20.0])
def test_pyramidkvs_budgets_fall_linearly(double_found, beta):
    weights = PyramidKV(beta=beta).layer_shares(double_found, None)
    deep = [weight for weight, store in zip(weights, double_found.stores) if not store.window]
    average, layers = 100.0, len(deep)
    last = average / beta
    first = 2 * average - last
    for place, weight in enumerate(deep):
        assert weight / sum(deep) * average * layers == pytest.approx(first + (last - first) * place / (layers - 1))
    assert all(weight > 0 for weight in weights)


# -- shares --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "budget", "expected"),
    [
        ((0.975, 0.025), 60.0, (0.8, 0.2)),  # the second is raised to 24 of 120
        ((0.9, 0.1), 80.0, (0.625, 0.375)),  # the first has all of its 100 tokens, the rest goes on
        ((0.5, 0.5), 60.0, (0.5, 0.5)),
        ((0.9, 0.1), 20.0, (0.5, 0.5)),
        ((0.9, 0.1), 100.0, (0.5, 0.5)),
        ((1.0, 0.0), 30.0, (0.6, 0.4)),
    ],
)
def test_every_layer_gets_its_smallest_size_and_none_more_than_all_tokens(shares, budget, expected):
    made = bounded_shares((SITE, OTHER), shares, budget, least=24, most=100)
    assert sum(made) == pytest.approx(1)
    assert made == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("h2o", {"heavy": 1.0}, "option 'heavy' of method 'h2o' is 1.0; expected a share between 0 and 1"),
        ("pyramidkv", {"beta": 0.5}, "option 'beta' of method 'pyramidkv' is 0.5; expected a number of at least 1"),
        ("pyramidkv", {"kernel": 4}, "option 'kernel' of method 'pyramidkv' is 4; expected an odd width"),
        ("chunkkv", {"chunk": 0}, "option 'chunk' of method 'chunkkv' is 0; expected at least 1"),
        ("chunkkv", {"window": 100}, "option 'window' of method 'chunkkv' is 100; expected 1 to 64 queries"),
        ("cake", {"tau1": 0.0}, "option 'tau1' of method 'cake' is 0.0; expected a positive number"),
        ("cake", {"gamma": -1.0}, "option 'gamma' of method 'cake' is -1.0; expected a number of at least 0"),
    ],
)
def test_options_are_checked(method, options, said):
    with pytest.raises(ConfigError, match=said):
        find_method(method, options)


def test_h2o_reads_all_queries(double_found):
    assert H2O().components(double_found, None).reads_queries


@pytest.mark.parametrize(
    ("room", "window", "recent", "tail"),
    [
        (200, 8, 32, 32),
        (61, 8, 32, 24),
        (24, 8, 32, 8),
        (200, 32, 0, 32),
        (40, 32, 0, 16),
        (64, 32, 48, 32),
    ],
)
def test_a_question_asked_later_fits_into_what_is_recent(room, window, recent, tail):
    """What stays exact shrinks to half of the room, the window with it."""
    _, first = SteadyVotes(window, 5, "mean", recent).keep(SITE, record(300, queries=64), room, 8)
    assert 300 - first == tail
