"""The token sketch: k-means in the queries' space, the choice of tokens, and what codes catch."""

import pytest
import torch

from semkv.profiles.calibration.codebooks import FLOOR, centroids, learn, space_of
from semkv.profiles.calibration.interpreter import full_attention, run_body
from semkv.profiles.calibration.measure import Sums
from semkv.profiles.calibration.measure_settings import MeasureSettings
from semkv.profiles.calibration.sketch import SINKS, WINDOW, Sketch, caught_mass, chosen_tokens
from semkv.profiles.schema.codes import Codebooks, nearest


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_the_root_squared_is_the_moment_of_queries(size):
    """In a unit of about a sixteenth of their own size: both ways fit half precision."""
    q, k = (torch.randn(2, 50, 6, generator=generator(seed)) for seed in (0, 1))
    moment = size**2 * (q.mT @ q)
    root, back = space_of(moment, k.mT @ k, 6)
    unit = torch.linalg.eigvalsh(moment)[:, -1].sqrt().log2().round().exp2()[:, None, None] / 16
    torch.testing.assert_close(root @ root.mT * unit**2 / size**2, moment / size**2, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(root @ back, torch.eye(6).expand(2, -1, -1), rtol=1e-4, atol=1e-4)
    assert max(float(x.half().abs().amax()) for x in (root, back)) < 100


@pytest.mark.parametrize("of", ["queries", "keys"])
def test_products_are_whole_where_queries_or_keys_have_no_other_directions(of):
    basis = torch.linalg.qr(torch.randn(2, 6, 6, generator=generator())).Q[..., :3]
    few = torch.randn(2, 50, 3, generator=generator(1)) @ basis.mT
    many = torch.randn(2, 50, 6, generator=generator(2))
    q, k = (few, many) if of == "queries" else (many, few)
    root, back = space_of(q.mT @ q, k.mT @ k, 3)
    assert (root.shape, back.shape) == ((2, 6, 3), (2, 3, 6))
    torch.testing.assert_close(q @ (k @ root @ back).mT, q @ k.mT, rtol=1e-3, atol=3e-2 if of == "queries" else 1e-3)


def test_no_other_directions_lose_less_of_the_products():
    """Queries are longest where keys hardly differ, as in heads with normalised queries and keys."""
    stretch = torch.tensor([10.0, 5.0, 2.0, 1.0, 0.5, 0.2])
    q = torch.randn(1, 400, 6, generator=generator()) * stretch
    k = torch.randn(1, 400, 6, generator=generator(1)) / stretch**2
    whole = (q @ k.mT).square().sum()

    def lost(root, back):
        return float((q @ (k @ root @ back).mT - q @ k.mT).square().sum() / whole)

    best = torch.linalg.svdvals(q[0].double() @ k[0].double().mT).square()
    for rank in (1, 2, 4):
        found = lost(*space_of(q.mT @ q, k.mT @ k, rank))
        assert found == pytest.approx(float(best[rank:].sum() / best.sum()), rel=1e-2)
        longest = torch.eye(6)[None, :, :rank]  # what queries alone would say
        assert found < 0.9 * lost(longest, longest.mT)


def test_directions_without_queries_do_no_harm():
    moment = torch.zeros(2, 4, 4)
    moment[0, 0, 0] = 9.0  # the second head has no queries at all
    root, back = space_of(moment, torch.eye(4).expand(2, -1, -1), 4)
    squared = root @ root.mT
    torch.testing.assert_close(
        squared[0].diagonal(), torch.tensor([9.0, *[9 * FLOOR] * 3]) * 4**2
    )  # a sixteenth of about 3 is 4 / 16
    torch.testing.assert_close(squared[1], torch.eye(4))
    assert back.isfinite().all()


def test_wider_heads_have_codes_of_more_bytes():
    settings = MeasureSettings()
    assert [settings.key_bytes(dim) for dim in (32, 64, 96, 128, 256, 576)] == [4, 4, 6, 8, 16, 16]
    assert [settings.directions(dim) for dim in (32, 64, 96, 128, 256, 576)] == [16, 32, 48, 64, 64, 64]
    asked = MeasureSettings(sketch_stages=2, sketch_rank=7)
    assert (asked.key_bytes(256), asked.directions(256)) == (2, 7)


def test_k_means_finds_groups_that_there_are():
    """Of vectors in many tight groups, no more than the groups' own spread is left."""
    middle = 10 * torch.randn(2, 64, 5, generator=generator())
    x = middle.repeat(1, 40, 1) + 0.01 * torch.randn(2, 2560, 5, generator=generator(1))
    book = centroids(x, 8, generator(2))
    left = x - torch.take_along_dim(book, nearest(x, book)[..., None], 1)
    assert float(left.square().sum(-1).mean()) < 1e-3
    assert float(x.square().sum(-1).mean()) > 100


def test_rounds_do_not_make_it_worse():
    x = torch.randn(1, 3000, 6, generator=generator())
    errors = []
    for rounds in (0, 1, 4, 12):
        book = centroids(x, rounds, generator(1))
        errors.append(float((x - torch.take_along_dim(book, nearest(x, book)[..., None], 1)).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]


def test_fewer_vectors_than_places_are_all_there():
    x = torch.randn(2, 9, 4, generator=generator())
    book = centroids(x, 3, generator(1))
    assert book.shape == (2, 256, 4)
    torch.testing.assert_close(torch.take_along_dim(book, nearest(x, book)[..., None], 1), x)


def test_stored_books_are_whole_multiples_of_a_scale():
    x = torch.randn(2, 2000, 6, generator=generator())
    books, scale = learn(x, 3, 4, generator(1))
    assert (books.dtype, scale.dtype) == (torch.uint8, torch.float16)
    assert books.shape == (2, 3, 256, 6)
    plain = (books.float() - 128) * scale.float()[..., None]
    codes = Codebooks(torch.zeros(2, 6), plain)
    errors = []
    for stages in (1, 2, 3):
        some = Codebooks(codes.mean, plain[:, :stages])
        errors.append(float((x - some.decode(some.encode(x))).square().mean()))
    assert errors[2] < 0.5 * errors[1] < 0.25 * errors[0]


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


def collected(subject, ids):
    calls = {}

    def collect(call):
        calls[call.site] = call
        return full_attention(call)

    with torch.no_grad():
        run_body(subject.program.body, ids, torch.arange(len(ids)), collect)
    return calls


def test_it_learns_of_the_models_keys_and_queries(subject, measure_settings):
    step, sums = Sketch(subject), Sums()
    samples = subject.data.measured
    for unit in range(len(samples)):
        step.measure(unit, sums)
    context, moment = measure_settings.length, 0.0
    for number, (_, ids) in enumerate(samples):
        call = collected(subject, ids)[1]
        q = call.q[:2, SINKS + WINDOW :].double().flatten(0, 1)  # the two query heads of KV head 0
        moment = moment + q.mT @ q / len(q)
        own = sums["keys.1"][:, number * (context - SINKS) : (number + 1) * (context - SINKS)]
        assert torch.equal(own, call.k[:, SINKS:context].half())
    torch.testing.assert_close(sums["queries.1"][0], moment, rtol=1e-4, atol=1e-5)
    step.measure(len(samples), sums)
    assert sums.get("keys.0") is None, "keys are forgotten once the books are made"
    assert sums["sketch.books.0"].shape == (2, 3, 256, 8)


def test_what_is_caught_follows_from_the_stored_tensors(subject, model, dense_weights, measure_settings):
    _, _, outcome = run(subject)
    context, count = measure_settings.length, round(measure_settings.sketch_share * measure_settings.length)
    far = slice(SINKS, context - WINDOW)
    caught, best = torch.zeros(3), 0.0
    books = outcome.section.codebooks(outcome.tensors, 0, [0], 3)
    for _, ids in subject.data.held_out:
        call = collected(subject, ids)[0]
        layer = dense_weights(model, ids)[0]
        for t in range(context, len(ids)):
            true = layer[:2, t, far]
            best += float(true[:, true.amax(0).argsort(descending=True)[:count]].sum())
            for stages in (1, 2, 3):
                some = Codebooks(books.mean, books.books[:, :stages], books.root, books.back)
                keys = some.decode(some.encode(call.k[:1, far]))[0]
                guess = torch.stack([torch.softmax(keys @ call.q[h, t] * call.scale, 0) for h in range(2)])
                caught[stages - 1] += float(true[:, guess.amax(0).argsort(descending=True)[:count]].sum())
    torch.testing.assert_close(outcome.tensors["sketch.caught.0"][0], caught / best, rtol=0, atol=5e-3)  # ties
    assert outcome.section.caught[0][0] == pytest.approx(float(caught[2]) / best, abs=5e-3)


def test_every_head_has_codes(subject):
    _, _, outcome = run(subject)
    assert [len(row) for row in outcome.section.caught] == [2, 2]
    assert outcome.note == ""
