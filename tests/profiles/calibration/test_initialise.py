"""The router's start: a shared projection that keeps what q.k depends on, and offsets that fit."""

import torch

from semkv.profiles.calibration import losses
from semkv.profiles.calibration.contexts import read_context
from semkv.profiles.calibration.initialise import explained, initialise, second_moment, shared_projection
from semkv.profiles.calibration.parameters import SekvParameters
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


def test_initialising_lowers_the_losses_on_routing(program, settings, data):
    divide = Divider(program, settings)
    contexts = [read_context(program, ids, settings, divide, 0.5, torch.float32) for ids in data.training[96]]
    parameters = SekvParameters(program, settings)
    before = routing_loss(parameters, contexts, settings)
    initialise(parameters, contexts, settings)
    assert routing_loss(parameters, contexts, settings) < before


def routing_loss(parameters, contexts, settings):
    total = 0.0
    with torch.no_grad():
        for context in contexts:
            for index, site in enumerate(context.sites):
                summaries = parameters.summaries(index, site.spans.mean_k)
                scores = parameters.relevance(index, site.q, summaries, site.spans.log_size)
                gates = scores - parameters.offset[str(index)][:, None, None]
                targets, mined = losses.zoom_targets(site.mass, settings)
                total += float(losses.zoom(gates, targets, mined, settings.positive_weight))
    return total


def test_summaries_are_projected_weighted_means(program, settings):
    """Eq. 3 in a loop: the normalised mean of projected keys is the normalised projection of the mean key."""
    parameters = SekvParameters(program, settings)
    generator = torch.Generator().manual_seed(2)
    k, weights = torch.randn(2, 5, 16, generator=generator), torch.softmax(torch.randn(5, generator=generator), 0)
    got = parameters.summaries(0, (k * weights[None, :, None]).sum(1, keepdim=True))
    router = parameters.router["0"].detach()
    for head in range(4):
        projected = sum(weights[t] * router[head] @ k[head // 2, t] for t in range(5))
        assert torch.allclose(got[head, 0], projected / projected.norm(), atol=1e-5)
