"""The four losses against loops written from the paper's equations."""

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


def naive_targets(mass, coverage, least, share):
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
            few = int(targets[head, query].sum()) <= share * spans
            mined[head, query] = total >= least and few
    return targets, mined


def test_zoom_targets_are_the_smallest_covering_sets(settings):
    mass = random_mass()
    targets, mined = losses.zoom_targets(mass, settings)
    expected, expected_mined = naive_targets(mass, settings.coverage, settings.mined_mass, settings.mined_share)
    assert torch.equal(targets, expected)
    assert torch.equal(mined, expected_mined)
    assert mined.any()
    assert not mined.all()


def test_zoom_targets_of_a_known_row(settings):
    mass = torch.tensor([[[0.5, 0.05, 0.31, 0.04, 0.1]]])
    targets, _ = losses.zoom_targets(mass, settings)
    assert targets[0, 0].tolist() == [True, False, True, False, True]


def test_zoom_loss_matches_a_loop():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 5, generator=generator)
    targets = torch.rand(2, 4, 5, generator=generator) > 0.7
    mined = torch.tensor([[True, False, True, True], [False, False, False, False]])
    expected = 0.0
    for head in range(2):
        rows = []
        for query in range(4):
            if not mined[head, query]:
                continue
            row = 0.0
            for span in range(5):
                gate = 1 / (1 + math.exp(-float(logits[head, query, span])))
                row += -10 * math.log(gate) if targets[head, query, span] else -math.log(1 - gate)
            rows.append(row / 5)
        expected += sum(rows) / len(rows) if rows else 0.0
    assert float(losses.zoom(logits, targets, mined, 10.0)) == pytest.approx(expected, rel=1e-5)


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


def test_budget_matches_a_loop():
    generator = torch.Generator().manual_seed(3)
    zooms = (torch.rand(4, 3, 5, generator=generator) > 0.5).float()
    keys, values = torch.rand(2, 5, 6, generator=generator), torch.rand(2, 5, 6, generator=generator)
    expected = 0.0
    for head in range(4):
        expected += sum(float(zooms[head, q, s]) for q in range(3) for s in range(5)) / 15
    for gates in (keys, values):
        for head in range(2):
            expected += 0.1 * sum(float(gates[head, s].sum()) for s in range(5)) / 5
    assert float(losses.budget(zooms, (keys, values), 0.1)) == pytest.approx(expected, rel=1e-5)


def test_distillation_is_the_divergence():
    generator = torch.Generator().manual_seed(4)
    teacher = torch.log_softmax(torch.randn(3, 6, generator=generator), -1)
    student = torch.log_softmax(torch.randn(3, 6, generator=generator), -1)
    expected = 0.0
    for row in range(3):
        p, q = teacher[row].exp(), student[row].exp()
        expected += sum(float(p[i]) * math.log(float(p[i]) / float(q[i])) for i in range(6)) / 3
    assert float(losses.distillation(teacher, student)) == pytest.approx(expected, rel=1e-5)
    assert float(losses.distillation(teacher, teacher)) == pytest.approx(0.0, abs=1e-6)


def test_ranking_matches_a_loop():
    mass = random_mass(heads=2, queries=3)
    scores = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(5))
    mined = torch.tensor([[True, True, False], [False, True, False]])
    expected = 0.0
    for head in range(2):
        rows = []
        for query in range(3):
            if mined[head, query]:
                p = mass[head, query] / mass[head, query].sum()
                q = torch.softmax(scores[head, query], 0)
                rows.append(sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q)))
        expected += sum(rows) / len(rows)
    assert float(losses.ranking(scores, mass, mined)) == pytest.approx(expected, rel=1e-4)


def test_ranking_is_least_at_the_teachers_own_order():
    mass = random_mass(heads=1, queries=1)
    mined = torch.ones(1, 1, dtype=torch.bool)
    assert float(losses.ranking(mass.log(), mass, mined)) == pytest.approx(0.0, abs=1e-5)
    assert float(losses.ranking(-mass.log(), mass, mined)) > 0.1
