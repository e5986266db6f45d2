"""A record against the model's own attention."""

import pytest
import torch

from semkv.errors import ConfigError
from semkv.profiles.calibration.contexts import candidates, far_queries, mass_of, piece_places, read_context
from semkv.profiles.calibration.segmentation import Divider


@pytest.fixture
def read(program, settings, data):
    records = {}
    segmentation = read_context(
        program, data.held_out[0], settings, Divider(program, settings), 0.5, records.__setitem__
    )
    return records, segmentation


def test_shares_are_the_models_attention(model, data, read, dense_weights):
    records, _ = read
    for site, layer in enumerate(dense_weights(model, data.held_out[0])):
        record = records[site]
        assert record.share.dtype == torch.float16
        torch.testing.assert_close(record.share.float(), layer[:, record.where], rtol=2e-3, atol=1e-4)


def test_tokens_are_exact_or_in_one_span(settings, read):
    records, segmentation = read
    record = records[0]
    for span, (start, length) in enumerate(zip(segmentation.starts.tolist(), segmentation.lengths.tolist())):
        assert torch.nonzero(record.span == span)[:, 0].tolist() == list(range(start, start + length))
        assert int(record.ends[span]) == start + length - 1
    assert bool((record.span[segmentation.recent :] == -1).all())
    assert bool((record.span[segmentation.kept] == -1).all())


def test_far_spans_have_left_the_window_of_a_query(settings, read):
    records, segmentation = read
    window = settings.length - segmentation.recent
    record = records[1]
    for row, where in enumerate(record.where.tolist()):
        for span, end in enumerate(record.ends.tolist()):
            assert bool(record.far[row, span]) == (end < where - window)
    assert record.far.any()
    assert not record.far.all()


def test_mass_is_the_attention_on_a_far_span(read):
    record = read[0][1].to(torch.device("cpu"))
    mass = mass_of(record.share, record.span, record.far)
    for span in range(0, mass.shape[-1], 3):
        inside = record.share[..., record.span == span].float().sum(-1)
        expected = torch.where(record.far[:, span], inside, torch.zeros_like(inside))
        torch.testing.assert_close(mass[..., span], expected, rtol=1e-4, atol=1e-6)


def test_the_weight_of_a_mean_is_in_units_of_the_whole(model, program, data, read):
    """exp(q.k + log |S|) over the sum of exp(q.k) of all tokens that the query sees."""
    from semkv.profiles.calibration.interpreter import full_attention, run_body

    calls = {}

    def collect(call):
        calls[call.site] = call
        return full_attention(call)

    ids = data.held_out[0]
    with torch.no_grad():
        run_body(program.body, ids, torch.arange(len(ids)), collect)
    record, call = read[0][0].to(torch.device("cpu")), calls[0]
    row = int(record.far.sum(-1).argmax())
    where = int(record.where[row])
    for head in range(4):
        q = call.q[head, where]
        whole = torch.logsumexp(call.k[head // 2, : where + 1] @ q * call.scale, 0)
        for span in torch.nonzero(record.far[row])[:, 0].tolist():
            logit = record.mean_k[head // 2, span] @ q * call.scale + record.lengths[span].log()
            assert float(record.coarse[head, row, span]) == pytest.approx(
                float((logit - whole).exp()), rel=5e-3, abs=1e-6
            )


def test_queries_are_drawn_where_attention_is_far(settings):
    mass = torch.zeros(2, 40, 3)
    mass[:, 5:13] = 1.0
    assert far_queries(mass, settings.model_copy(update={"queries": 8})).tolist() == list(range(5, 13))
    places = candidates(100, 8)
    assert places.tolist() == sorted(set(places.tolist()))
    assert places[:8].min() == 25
    assert places[-8:].tolist() == list(range(100, 108))


def test_pieces_reach_beyond_the_largest_rank_and_their_values_are_the_svds(data, settings, read):
    at, sizes = piece_places(settings.length, settings.max_rank)
    assert max(sizes) == 2 * settings.max_rank
    assert all(a + size <= settings.length for a, size in zip(at, sizes))
    record = read[0][0]
    place = sizes.index(8)
    expected = torch.linalg.svdvals(record.v[:, at[place] : at[place] + 8].float())
    torch.testing.assert_close(record.value_sigma[:, place, :8].float(), expected, rtol=1e-2, atol=1e-2)
    assert not record.value_sigma[:, place, 8:].any()


def test_a_context_without_spans_is_refused(program, settings, data):
    short = data.held_out[0][: 12 + settings.queries]
    with pytest.raises(ConfigError, match=r"a context of 12 tokens has nothing to fold: give a larger --length"):
        read_context(program, short, settings, Divider(program, settings), 0.5, lambda *_: None)
