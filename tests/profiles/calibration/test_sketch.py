"""The token sketch: the best maps of their rank, the choice of tokens, ranks and bits per head."""

import dataclasses

import pytest
import torch

from semkv.profiles.calibration.calibrate import model_facts
from semkv.profiles.calibration.measure import Sums
from semkv.profiles.calibration.sketch import Sketch, best_projections, caught_mass, chosen_tokens
from semkv.profiles.schema import Profile, ProfileInfo, RetrievalHeads


def moments(seed, heads=2, dim=6):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
    return factors @ factors.transpose(1, 2)


def expected_error(queries, keys, a, b):
    """E[(q.k - (qA).(kB))^2] for independent q, k: tr(Cq E Ck E^T) with E = I - A B^T."""
    error = torch.eye(queries.shape[-1], dtype=torch.float64) - a @ b.transpose(-1, -2)
    return torch.einsum("hij,hjk,hkl,hil->h", queries, error, keys, error)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_error_is_the_tail_of_the_spectrum(rank):
    queries, keys = moments(0), moments(1)
    a, b, spectrum = best_projections(queries, keys, rank)
    whole = torch.einsum("hij,hji->h", queries, keys)
    tail = spectrum[:, rank:].sum(-1)
    torch.testing.assert_close(expected_error(queries, keys, a, b) / whole, tail, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(spectrum.sum(-1), torch.ones(2, dtype=torch.float64))


def test_the_error_is_that_of_samples():
    generator = torch.Generator().manual_seed(2)
    queries, keys = moments(0, heads=1), moments(1, heads=1)
    q = torch.randn(40_000, 6, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(queries)[0].T
    k = torch.randn(40_000, 6, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(keys)[0].T
    a, b, spectrum = best_projections(queries, keys, 2)
    exact = (q * k).sum(-1)
    sketched = ((q @ a[0]) * (k @ b[0])).sum(-1)
    ratio = (exact - sketched).square().mean() / exact.square().mean()
    assert float(ratio) == pytest.approx(float(spectrum[0, 2:].sum()), abs=0.02)


def test_no_nearby_maps_of_the_rank_are_better():
    queries, keys = moments(3), moments(4)
    a, b, _ = best_projections(queries, keys, 2)
    best = expected_error(queries, keys, a, b)
    generator = torch.Generator().manual_seed(5)
    for size in (1e-3, 1e-2, 1e-1, 1.0):
        for _ in range(20):
            noise = [size * torch.randn(a.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
            assert (expected_error(queries, keys, a + noise[0], b + noise[1]) >= best - 1e-6).all()


def test_the_first_columns_are_the_best_maps_of_a_lower_rank():
    queries, keys = moments(0), moments(1)
    wide, narrow = best_projections(queries, keys, 5), best_projections(queries, keys, 2)
    torch.testing.assert_close(wide[0][..., :2], narrow[0])
    torch.testing.assert_close(wide[1][..., :2], narrow[1])


def test_dimensions_that_never_vary_do_no_harm():
    queries, keys = moments(0), moments(1)
    keys[:, 4:], keys[:, :, 4:] = 0, 0
    a, b, spectrum = best_projections(queries, keys, 6)
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    assert float(spectrum[:, :4].sum(-1).min()) > 0.999


def test_tokens_are_chosen_by_the_best_query_head_of_a_group():
    scores = torch.tensor([[[0.5, 0.1, 0.4, 0.0]], [[0.0, 0.6, 0.1, 0.3]]])  # two query heads of one KV head
    chosen = chosen_tokens(scores, 1, 2)
    assert chosen.tolist() == [[[True, True, False, False]]]
    assert caught_mass(scores, chosen).item() == pytest.approx(0.5 + 0.1 + 0.0 + 0.6)


def run(subject):
    step, sums = Sketch(subject), Sums()
    for unit in range(step.units):
        step.measure(unit, sums)
    return step, sums, step.finish(sums)


def test_covariances_are_those_of_the_models_queries_and_centred_keys(subject, measure_settings):
    from semkv.profiles.calibration.interpreter import full_attention, run_body

    _, sums, outcome = run(subject)
    context, queries, keys = measure_settings.length, [], []
    for _, ids in subject.data.measured:
        calls = {}

        def collect(call, calls=calls):
            calls[call.site] = call
            return full_attention(call)

        with torch.no_grad():
            run_body(subject.program.body, ids, torch.arange(len(ids)), collect)
        k = calls[1].k[0, :context].double()
        keys.append(k - k.mean(0))
        queries.append(calls[1].q[:2, context:].double().flatten(0, 1))  # the two query heads of KV head 0
    count = float(sums["samples.1"])
    for name, rows in (("queries", queries), ("keys", keys)):
        naive = sum(row.T @ row / len(row) for row in rows) / len(rows)
        torch.testing.assert_close(sums[f"{name}.1"][0] / count, naive, rtol=1e-4, atol=1e-5)
    assert outcome.tensors["sketch.query.1"].shape == (2, 16, 8)
    assert outcome.tensors["sketch.spectrum.1"].shape == (2, 16)


def test_what_is_caught_follows_from_the_stored_tensors(subject, model, dense_weights, measure_settings):
    from semkv.profiles.calibration.interpreter import full_attention, run_body
    from semkv.profiles.schema.codes import decode, encode

    step, _, outcome = run(subject)
    place = step.candidates.index((8, 8))
    context, count = measure_settings.length, round(measure_settings.sketch_share * measure_settings.length)
    caught = best = 0.0
    for _, ids in subject.data.held_out:
        calls = {}

        def collect(call, calls=calls):
            calls[call.site] = call
            return full_attention(call)

        with torch.no_grad():
            run_body(subject.program.body, ids, torch.arange(len(ids)), collect)
        part = {name: outcome.tensors[f"sketch.{name}.0"] for name in ("query", "key", "mean", "std")}
        codes = calls[0].k[:, :context] @ part["key"]
        codes = decode(encode(codes, part["mean"], part["std"], 8), part["mean"], part["std"], 8)
        layer = dense_weights(model, ids)[0]
        for t in range(context, len(ids)):
            guess = torch.stack(
                [torch.softmax(codes[0] @ (calls[0].q[h, t] @ part["query"][0]) * calls[0].scale, 0) for h in range(2)]
            )
            for row, kind in ((guess, "caught"), (layer[:2, t, :context], "best")):
                chosen = row.amax(0).argsort(descending=True)[:count]
                got = float(layer[:2, t][:, chosen].sum())
                caught, best = (caught + got, best) if kind == "caught" else (caught, best + got)
    assert float(outcome.tensors["sketch.caught.0"][0, place]) == pytest.approx(caught / best, abs=2e-3)


def test_heads_that_do_not_retrieve_get_none(subject):
    rows = ((0.0, 0.01, 0.6, 0.2), (0.0, 0.0, 0.0, 0.02))
    heads = RetrievalHeads(semantic=rows, classic=rows, classic_top_k=rows, tests=1, passed=1)
    info = ProfileInfo(fingerprint="f" * 64, model=model_facts(subject.program, "tiny"), retrieval_heads=heads)
    _, _, outcome = run(dataclasses.replace(subject, profile=Profile(info)))
    section = outcome.section
    assert section.ranks[0][0] == section.bits[0][0] == 0
    assert section.ranks[0][1] > 0
    assert section.ranks[1] == section.bits[1] == (0, 0)
    assert section.bytes_per_token(0) == section.ranks[0][1] * section.bits[0][1] / 8
    assert outcome.note == ""


def test_the_cheapest_candidate_that_is_enough_is_taken(subject):
    step = Sketch(subject)
    assert step.candidates == [(2, 2), (2, 8), (8, 2), (8, 8)]
    assert step._cheapest([0.5, 0.92, 0.91, 0.99]) == 1
    assert step._cheapest([0.5, 0.6, 0.7, 0.65]) == 2


def test_without_known_retrieval_heads_every_head_has_a_sketch(subject):
    _, _, outcome = run(subject)
    assert all(rank for row in outcome.section.ranks for rank in row)
    assert "run the step retrieval-heads first" in outcome.note
