"""Truncated SVD: the randomised one against LAPACK."""

from __future__ import annotations

import pytest
import torch

from semkv.kernels.low_rank import randomized_svd, truncated_svd_reference


def rebuilt(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    u, s, v = parts
    return (u * s[..., None, :]) @ v.mT


def decaying(*shape: int, seed: int = 0) -> torch.Tensor:
    """Matrices whose singular values fall by a third each."""
    torch.manual_seed(seed)
    x = torch.randn(*shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u * (0.66 ** torch.arange(s.shape[-1], dtype=torch.float64))) @ vh


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (63, 111), (111, 60), (1, 9), (9, 1), (2, 3, 24, 64)])
@pytest.mark.parametrize("rank", [1, 4, 32])
def test_error_is_that_of_the_best_approximation(shape, rank):
    x = decaying(*shape)
    parts, best = randomized_svd(x, rank), truncated_svd_reference(x, rank)
    assert [part.shape for part in parts] == [part.shape for part in best]
    torch.testing.assert_close(parts[1], best[1], rtol=1e-3, atol=1e-6)
    error = (x - rebuilt(parts)).norm(dim=(-1, -2))
    assert (error <= 1.01 * (x - rebuilt(best)).norm(dim=(-1, -2)) + 1e-6).all()


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (12, 12)])
def test_factors_are_orthonormal(shape):
    u, s, v = randomized_svd(decaying(*shape), 5)
    eye = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(u.mT @ u, eye, rtol=0, atol=1e-6)
    torch.testing.assert_close(v.mT @ v, eye, rtol=0, atol=1e-5)
    assert (s[:-1] >= s[1:]).all()


@pytest.mark.parametrize("shape", [(20, 64), (64, 20)])
def test_rank_deficient_and_zero_matrices(shape):
    torch.manual_seed(2)
    x = torch.randn(shape[0], 2, dtype=torch.float64) @ torch.randn(2, shape[1], dtype=torch.float64)
    stacked = torch.stack((x, torch.zeros_like(x)))
    parts = randomized_svd(stacked, 6)
    assert all(torch.isfinite(part).all() for part in parts)
    torch.testing.assert_close(rebuilt(parts), stacked, rtol=1e-5, atol=1e-6)
    assert (parts[1][0, 2:] < 1e-5 * parts[1][0, 0]).all()


def test_a_batch_is_its_matrices_one_by_one():
    x = decaying(3, 20, 16)
    whole = rebuilt(randomized_svd(x, 16))
    for index in range(3):
        torch.testing.assert_close(whole[index], rebuilt(randomized_svd(x[index], 16)), rtol=1e-8, atol=1e-9)


def test_half_precision_is_computed_in_float32():
    x = decaying(20, 16).to(torch.float16)
    u, s, v = randomized_svd(x, 16)
    assert u.dtype == s.dtype == v.dtype == torch.float32
    torch.testing.assert_close(rebuilt((u, s, v)), x.float(), rtol=1e-3, atol=1e-3)


def test_the_global_generator_decides_nothing_and_stays_as_it_is():
    x = decaying(2, 48, 64)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = randomized_svd(x, 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, randomized_svd(x, 5)))
    other = randomized_svd(x, 5, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(first[0], other[0])
