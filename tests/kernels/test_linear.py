"""`semkv::linear` beside PyTorch's: rows and weights on both sides of what it streams, dtypes, layouts, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from semkv.ir.ops import linear
from semkv.kernels.linear import FEW_TOKENS, SMALL_WEIGHT

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1, 1), (3,), (2, 1, 3), (FEW_TOKENS,), (FEW_TOKENS + 1,), (0,)])
@pytest.mark.parametrize("sizes", [(13, 7), (131, 513), (SMALL_WEIGHT // 256, 256), (257, 259)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_product(dtype, rows, sizes, bias):
    weight = drawn(*sizes, dtype=dtype)
    x, b = drawn(*rows, sizes[1], dtype=dtype, seed=1), drawn(sizes[0], dtype=dtype, seed=2) if bias else None
    with torch.no_grad():
        got = linear(x, weight, b)
    assert got.dtype == dtype
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    assert got.shape == expected.shape
    plain = rounding(F.linear(x, weight, b), expected)
    assert rounding(got, expected) <= 1.5 * plain + torch.finfo(dtype).tiny  # sums in another order


def rounding(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean squared difference."""
    return float((got.double() - expected).square().mean().nan_to_num().sqrt())


def test_neither_neighbours_nor_threads_change_a_bit():
    """A row of a batch, and a step of a machine with more cores, give the tokens of the row alone."""
    x, weight = drawn(FEW_TOKENS, 301), drawn(157, 301, seed=1)
    before = torch.get_num_threads()
    with torch.no_grad():
        whole = linear(x, weight)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(linear(x[row], weight), whole[row]) for row in range(FEW_TOKENS))
    torch.set_num_threads(before)


def test_strided_tokens_and_weights():
    weight, x = drawn(1024, 600)[:, ::2], drawn(4, 600)[:, ::2]
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)
        whole = weight.contiguous()
        torch.testing.assert_close(linear(x, whole), x @ whole.T, rtol=1e-4, atol=1e-4)


def test_gradients_flow():
    x, weight, bias = (drawn(*shape).requires_grad_() for shape in ((2, 512), (512, 512), (512,)))
    given = drawn(2, 512, seed=3)
    linear(x, weight, bias).backward(given)
    got = [y.grad.clone() for y in (x, weight, bias)]
    for y in (x, weight, bias):
        y.grad = None
    F.linear(x, weight, bias).backward(given)
    for mine, y in zip(got, (x, weight, bias)):
        torch.testing.assert_close(mine, y.grad)


def test_shapes_are_known_without_numbers():
    with torch.device("meta"):
        x, weight = torch.empty(2, 3, 8), torch.empty(5, 8)
    assert linear(x, weight).shape == (2, 3, 5)
