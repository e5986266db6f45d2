"""Stability, similarity and roles against loops over the full attention of the modelling code."""

from statistics import median

import pytest
import torch

from semkv.profiles.calibration.measure import Sums
from semkv.profiles.calibration.taxonomy import Taxonomy, set_size, similarity, stability, top_sets
from semkv.profiles.schema.roles import head_roles


def naive_set(row, k, pool):
    """The k places with the largest mean over a window of `pool`, zeros beyond both ends; of equals the first."""
    half = pool // 2
    padded = [0.0] * half + list(row) + [0.0] * half
    means = [sum(padded[i : i + pool]) / pool for i in range(len(row))]
    return set(sorted(range(len(row)), key=lambda i: -means[i])[:k])


def naive_sample(layer, context, k, pool, kv_heads):
    """Eq. 1-3 for one layer's attention [Hq, T, T]: stability [Hkv], similarity [Hkv], overlap [Hkv][Hkv]."""
    grouped = layer.unflatten(0, (kv_heads, -1)).mean(1)
    steps = range(context, layer.shape[1])

    def seen(head, query):
        # The pooled weights of a query reach one place behind it, which holds no token yet.
        return naive_set(grouped[head, query].tolist()[: query + 1], k, pool)

    overlap = lambda a, b: len(a & b) / k  # noqa: E731
    base = [seen(head, context - 1) for head in range(kv_heads)]
    sets = {(head, t): seen(head, t) for head in range(kv_heads) for t in steps}
    stable = [median(overlap(sets[h, t], base[h]) for t in steps) for h in range(kv_heads)]
    others = lambda h: [o for o in range(kv_heads) if o != h]  # noqa: E731
    similar = [median(max(overlap(sets[h, t], sets[o, t]) for o in others(h)) for t in steps) for h in range(kv_heads)]
    pairs = [[median(overlap(sets[h, t], sets[o, t]) for t in steps) for o in range(kv_heads)] for h in range(kv_heads)]
    return stable, similar, pairs


def test_the_section_is_the_mean_over_samples_of_the_naive_figures(subject, model, dense_weights, measure_settings):
    step, sums = Taxonomy(subject), Sums()
    for unit in range(step.units):
        step.measure(unit, sums)
    outcome = step.finish(sums)
    section = outcome.section
    k = set_size(measure_settings.length, measure_settings.top_share)
    assert k == 10
    for store in range(2):
        rows = [
            naive_sample(dense_weights(model, ids)[store], measure_settings.length, k, measure_settings.pool, 2)
            for _, ids in subject.data.measured
        ]
        mean = lambda place: torch.tensor([row[place] for row in rows]).mean(0)  # noqa: B023, E731
        assert section.stability[store] == pytest.approx(mean(0).tolist(), abs=1e-5)
        assert section.similarity[store] == pytest.approx(mean(1).tolist(), abs=1e-5)
        torch.testing.assert_close(outcome.tensors[f"taxonomy.overlap.{store}"], mean(2))
        made = head_roles(section.stability[store], mean(2).tolist(), 0.5, 0.5)
        assert (section.roles[store], section.clusters[store]) == made
    assert section.samples == 4
    assert section.transfer.keys() == {"one", "two"}


def test_sets_hold_no_token_behind_their_query():
    weights = torch.zeros(1, 3, 8)
    weights[0, :, 4] = 1.0  # pooling spreads it over places 2 to 6
    sets = top_sets(weights, 4, 3, 5)
    for query, row in enumerate(sets[0], start=4):
        places = row.nonzero().flatten().tolist()
        assert len(places) == 3
        assert min(places) >= 2
        assert max(places) <= min(query, 6)
    assert not top_sets(weights, 4, 5, 5)[0, 0, 5:].any()


def test_medians_and_the_head_itself():
    assert stability(torch.tensor([[0.1], [0.9], [0.4], [0.6]])).item() == pytest.approx(0.5)
    pairs = torch.tensor([[[1.0, 0.2, 0.3], [0.2, 1.0, 0.7], [0.3, 0.7, 1.0]]])
    assert similarity(pairs).tolist() == pytest.approx([0.3, 0.7, 0.7])
    assert similarity(torch.ones(4, 1, 1)).tolist() == [0.0]


def test_block_size_changes_nothing(subject, measure_settings):
    import dataclasses

    whole = dataclasses.replace(subject, settings=measure_settings.model_copy(update={"block": 1000}))
    figures = []
    for one in (subject, whole):
        step, sums = Taxonomy(one), Sums()
        step.measure(0, sums)
        figures.append(sums.tensors)
    for name, tensor in figures[0].items():
        torch.testing.assert_close(tensor, figures[1][name])


def test_stores_that_keep_a_window_are_anchors(subject):
    import dataclasses

    sites = subject.program.sites
    windowed = (dataclasses.replace(sites[0], window=16, treatment="window"), sites[1])
    step, sums = Taxonomy(dataclasses.replace(subject, program=subject.program.evolve(sites=windowed))), Sums()
    for unit in range(step.units):
        step.measure(unit, sums)
    outcome = step.finish(sums)
    assert outcome.section.roles[0] == ("anchor", "anchor")
    assert outcome.section.stability[0] == (1.0, 1.0)
    assert list(outcome.tensors) == ["taxonomy.overlap.1"]
