"""A layer at mixed resolution: the teacher where all is open, the operator where some is, and differentiable."""

import pytest
import torch

from semkv.kernels.mixed_attention import mixed_attention_reference
from semkv.profiles.calibration.contexts import record_of
from semkv.profiles.calibration.interpreter import SiteCall, full_attention
from semkv.profiles.calibration.layer import layer_output, output_error
from semkv.profiles.calibration.parameters import straight_through
from semkv.runtime.store.segments import Segmentation

N, QUERIES, KEPT = 40, 6, 3


@pytest.fixture(params=[(0.0, False), (5.0, True)], ids=["plain", "soft-cap and sinks"])
def layer(request, settings):
    """A call of all tokens with its record: two KV heads of two query heads; spans of 1 to 7 tokens."""
    softcap, with_sinks = request.param
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    tokens = N + QUERIES
    sinks = draw(4) if with_sinks else None
    call = SiteCall(
        0,
        draw(4, tokens, 8),
        draw(2, tokens, 8),
        draw(2, tokens, 5),
        torch.arange(tokens),
        sinks,
        None,
        None,
        0.35,
        softcap,
        0,
    )
    lengths = torch.tensor([7, 4, 1, 6, 5, 7])
    starts = KEPT + lengths.cumsum(0) - lengths
    cut = Segmentation(torch.arange(KEPT), starts, lengths, KEPT + int(lengths.sum()))
    at = torch.tensor([20, 30, *range(N, tokens)])
    asked = SiteCall(**{**vars(call), "q": call.q[:, at], "positions": call.positions[at]})
    record = record_of(asked, N, cut, torch.ones(tokens), settings.model_copy(update={"queries": 8, "summary_bits": 8}))
    return call, record.to(torch.device("cpu"))


def test_everything_open_is_the_teacher(layer):
    call, record = layer
    rows = torch.arange(8)
    expected = full_attention(call)[:, record.where]
    opened = torch.ones(4, 8, len(record.lengths))
    for output in (layer_output(record, None, rows), layer_output(record, opened, rows)):
        torch.testing.assert_close(output, expected, rtol=5e-3, atol=2e-3)
    assert float(output_error(layer_output(record, opened, rows), expected)) < 1e-4
    assert float(output_error(layer_output(record, 0 * opened, rows), expected)) > 0.05


def test_some_open_is_the_operator(layer):
    """Per query head and query, against the reference of `semkv::mixed_attention`."""
    call, record = layer
    rows = torch.tensor([1, 4, 7])
    zoom = (torch.rand(4, 3, len(record.lengths), generator=torch.Generator().manual_seed(2)) > 0.5).float()
    got = layer_output(record, zoom, rows)
    where, far = record.where[rows], record.far[rows]
    tokens = call.k.shape[1]
    exact, coarse = torch.zeros(4, 3, tokens), torch.full((4, 3, len(record.lengths)), float("-inf"))
    for span in range(len(record.lengths)):
        closed = far[:, span] & (zoom[..., span] == 0)
        exact[..., record.span == span] = torch.where(closed, float("-inf"), 0.0)[..., None]
        coarse[..., span] = torch.where(closed, record.lengths[span].float().log(), torch.tensor(float("-inf")))
    middle = record.ends - record.lengths // 2
    expected = mixed_attention_reference(
        call.q[:, where][None],
        where[None],
        [x[None] for x in (call.k, record.mean_k)],
        [x[None] for x in (call.v, record.mean_v)],
        [x[None, None] for x in (torch.arange(tokens), middle)],
        [exact[None], coarse[None]],
        sinks=call.sinks,
        scale=call.scale,
        softcap=call.softcap,
    )[0]
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=5e-3)


def test_gradients_reach_closed_decisions(layer):
    _, record = layer
    logits = torch.full((4, 8, len(record.lengths)), -0.5, requires_grad=True)
    rows = torch.arange(8)
    error = output_error(layer_output(record, straight_through(logits), rows), layer_output(record, None, rows))
    error.backward()
    far = record.far.expand_as(logits)
    assert bool((logits.grad[far] != 0).any())
    assert not logits.grad[~far].any()


def test_the_error_is_relative_to_each_heads_energy():
    teacher = torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]])
    other = torch.tensor([[[3.0, 3.0]], [[0.0, 3.0]]])
    assert float(output_error(other, teacher)) == pytest.approx(1 / 25 + 4)


def test_a_closed_decision_still_has_a_gradient():
    logits = torch.tensor([-3.0, -0.1, 0.1, 3.0], requires_grad=True)
    decided = straight_through(logits)
    assert decided.tolist() == [0.0, 0.0, 1.0, 1.0]
    decided.sum().backward()
    assert torch.allclose(logits.grad, torch.sigmoid(logits.detach()) * torch.sigmoid(-logits.detach()))
