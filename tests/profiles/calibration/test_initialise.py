"""The router's start: a shared projection that keeps what q.k depends on, and offsets that fit."""

import pytest
import torch

from semkv.profiles.calibration import losses
from semkv.profiles.calibration.contexts import mass_of, read_context
from semkv.profiles.calibration.initialise import explained, initialise, second_moment, shared_projection
from semkv.profiles.calibration.parameters import RouterParameters
from semkv.profiles.calibration.segmentation import Divider


def test_a_projection_finds_the_directions_that_matter():
    """Queries and keys that share four of sixteen directions are projected without loss."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator)).Q
    strength = torch.tensor([3.0, 2.0, 1.5, 1.0] + [0.01] * 12)
    q = torch.randn(2, 500, 16, generator=generator) * strength @ basis.mT
    k = torch.randn(2, 500, 16, generator=generator) * strength @ basis.mT
    queries, keys = second_moment([q]), second_moment([k])
    weight = shared_projection(queries, keys, 4)
    assert weight.shape == (2, 4, 16)
    assert bool((explained(weight, queries, keys) > 0.99).all())
    random = torch.randn(2, 4, 16, generator=generator) / 4
    assert bool((explained(random, queries, keys) < 0.6).all())


def test_more_dimensions_explain_more():
    generator = torch.Generator().manual_seed(1)
    queries, keys = (second_moment([torch.randn(3, 400, 12, generator=generator)]) for _ in range(2))
    shares = [explained(shared_projection(queries, keys, rank), queries, keys) for rank in (2, 6, 12)]
    assert bool((shares[0] < shares[1]).all())
    assert bool((shares[1] < shares[2]).all())


@pytest.mark.parametrize("start", ["covariance", "identity", "random"])
def test_scores_begin_as_logits_of_mean_keys_and_offsets_fit(program, settings, data, start):
    own = settings.model_copy(update={"router_init": start, "mined_mass": 0.0, "mined_share": 1.0})
    divide, records = Divider(program, own), []
    for ids in data.training:
        read_context(program, ids, own, divide, 0.5, lambda site, made: records.append(made) if site == 0 else None)
    records = [record.to(torch.device("cpu")) for record in records]
    site = program.sites[0]
    parameters = RouterParameters(site, own)
    initialise(parameters, records, site.scale, own)
    if start == "identity":
        for head in range(4):
            keys = torch.stack([record.mean_k[head // 2].norm(dim=-1).mean() for record in records]).mean()
            torch.testing.assert_close(
                parameters.router[head], float(keys * site.scale * 4) * torch.eye(16), rtol=1e-4, atol=1e-5
            )
    best = routing_loss(parameters, records, own)
    for change in (-2.0, 2.0):
        moved = RouterParameters(site, own)
        moved.load_state_dict(parameters.state_dict())
        moved.offset.data.add_(change)
        assert routing_loss(moved, records, own) > best


def routing_loss(parameters, records, settings):
    total = 0.0
    with torch.no_grad():
        for record in records:
            mass = mass_of(record.share, record.span, record.far)
            targets, mined = losses.zoom_targets(mass, record.far, settings)
            logits = parameters.margins(record) + parameters.threshold[:, None, None]
            total += float(losses.zoom(logits, targets, mined, record.far, settings.positive_weight))
    return total


def test_summaries_are_projected_weighted_means(program, settings):
    """Eq. 3 in a loop: the normalised mean of projected keys is the normalised projection of the mean key."""
    parameters = RouterParameters(program.sites[0], settings)
    generator = torch.Generator().manual_seed(2)
    k, weights = torch.randn(2, 5, 16, generator=generator), torch.softmax(torch.randn(5, generator=generator), 0)
    got = parameters.summaries((k * weights[None, :, None]).sum(1, keepdim=True))
    router = parameters.router.detach()
    for head in range(4):
        projected = sum(weights[t] * router[head] @ k[head // 2, t] for t in range(5))
        assert torch.allclose(got[head, 0], projected / projected.norm(), atol=1e-5)
