"""The losses against loops written from the paper's equations."""

import math

import pytest
import torch

from semkv.profiles.calibration import CalibrationSettings, losses


@pytest.fixture
def settings():
    return CalibrationSettings(mined_mass=0.3, mined_share=0.5)


def random_mass(heads=3, queries=5, spans=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(heads, queries, spans + 1, generator=generator) ** 4
    return (raw / raw.sum(-1, keepdim=True))[..., :spans]


def random_far(queries=5, spans=7, seed=9):
    far = torch.rand(queries, spans, generator=torch.Generator().manual_seed(seed)) > 0.3
    far[:, 0] = True
    return far


def naive_targets(mass, far, coverage, least, share):
    """Eq. 12 by adding spans one at a time, largest first, until `coverage` is reached."""
    heads, queries, spans = mass.shape
    targets = torch.zeros_like(mass, dtype=torch.bool)
    mined = torch.zeros(heads, queries, dtype=torch.bool)
    for head in range(heads):
        for query in range(queries):
            row = mass[head, query]
            total, reached = float(row.sum()), 0.0
            for span in sorted(range(spans), key=lambda i: -float(row[i])):
                if reached >= coverage * total:
                    break
                targets[head, query, span] = True
                reached += float(row[span])
            few = int(targets[head, query].sum()) <= max(1, share * int(far[query].sum()))
            mined[head, query] = total >= least and few
    return targets, mined


def test_zoom_targets_are_the_smallest_covering_sets(settings):
    far = random_far()
    mass = random_mass() * far
    targets, mined = losses.zoom_targets(mass, far, settings)
    expected, expected_mined = naive_targets(mass, far, settings.coverage, settings.mined_mass, settings.mined_share)
    assert torch.equal(targets, expected)
    assert torch.equal(mined, expected_mined)
    assert mined.any()
    assert not mined.all()


def test_zoom_targets_of_a_known_row(settings):
    mass = torch.tensor([[[0.5, 0.05, 0.31, 0.04, 0.1]]])
    targets, _ = losses.zoom_targets(mass, torch.ones(1, 5, dtype=torch.bool), settings)
    assert targets[0, 0].tolist() == [True, False, True, False, True]


def test_zoom_loss_matches_a_loop():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 5, generator=generator)
    far = random_far(4, 5)
    targets = (torch.rand(2, 4, 5, generator=generator) > 0.7) & far
    mined = torch.tensor([[True, False, True, True], [False, False, False, False]])
    expected = 0.0
    for head in range(2):
        rows = []
        for query in range(4):
            if not mined[head, query]:
                continue
            row = 0.0
            for span in torch.nonzero(far[query])[:, 0].tolist():
                gate = 1 / (1 + math.exp(-float(logits[head, query, span])))
                row += -10 * math.log(gate) if targets[head, query, span] else -math.log(1 - gate)
            rows.append(row / int(far[query].sum()))
        expected += sum(rows) / len(rows) if rows else 0.0
    assert float(losses.zoom(logits, targets, mined, far, 10.0)) == pytest.approx(expected, rel=1e-5)


def test_reconstruction_is_the_true_relative_error():
    """Eq. 14 equals the squared error of the rebuilt matrix: the components are orthonormal."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 6, 4, generator=generator)
    gates = torch.rand(2, 3, 4, generator=generator)
    u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
    expected = 0.0
    for head in range(2):
        errors = []
        for span in range(3):
            rebuilt = sum(
                gates[head, span, i] * sigma[head, span, i] * torch.outer(u[head, span, :, i], vt[head, span, i])
                for i in range(4)
            )
            errors.append(float((x[head, span] - rebuilt).square().sum() / x[head, span].square().sum()))
        expected += sum(errors) / len(errors)
    assert float(losses.reconstruction(gates, sigma)) == pytest.approx(expected, rel=1e-4)


def test_reconstruction_has_no_gradient_into_singular_values():
    sigma = torch.rand(1, 2, 3, requires_grad=True)
    gates = torch.rand(1, 2, 3, requires_grad=True)
    losses.reconstruction(gates, sigma).backward()
    assert sigma.grad is None
    assert gates.grad.abs().sum() > 0


def test_the_retained_rank_counts_components_that_exist():
    generator = torch.Generator().manual_seed(3)
    gates, sigma = (torch.rand(2, 5, 6, generator=generator) for _ in range(2))
    sigma[:, 1, 2:] = 0
    expected = sum(
        sum(float(gates[head, s, i]) for i in range(6) if sigma[head, s, i] > 0) / 5
        for head in range(2)
        for s in range(5)
    )
    assert float(losses.retained_rank(gates, sigma)) == pytest.approx(expected, rel=1e-5)


def test_ranking_matches_a_loop():
    far = random_far(3)
    mass = random_mass(heads=2, queries=3) * far
    scores = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(5))
    mined = torch.tensor([[True, True, False], [False, True, False]])
    expected = 0.0
    for head in range(2):
        rows = []
        for query in range(3):
            if mined[head, query]:
                seen = far[query]
                p = mass[head, query][seen] / mass[head, query].sum()
                q = torch.softmax(scores[head, query][seen], 0)
                rows.append(sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q)))
        expected += sum(rows) / len(rows)
    assert float(losses.ranking(scores, mass, mined, far)) == pytest.approx(expected, rel=1e-4)


def test_ranking_is_least_at_the_teachers_own_order():
    mass = random_mass(heads=1, queries=1)
    mined, far = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 7, dtype=torch.bool)
    assert float(losses.ranking(mass.log(), mass, mined, far)) == pytest.approx(0.0, abs=1e-5)
    assert float(losses.ranking(-mass.log(), mass, mined, far)) > 0.1
