"""Log-softmax in place in C++, against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch

from semkv.kernels.cpp import compiler
from semkv.kernels.log_softmax import log_softmax
from semkv.kernels.log_softmax.cpp import PART, log_softmax_cpp

pytestmark = pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")
NONE = float("-inf")


def drawn(*shape: int) -> torch.Tensor:
    """Scores of a spread that exponentials of most of a row vanish."""
    return 30 * torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])) - 7


@pytest.mark.parametrize("size", [1, 15, 16, 63, 1000, PART - 1, PART, PART + 1, 2 * PART + 17])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_pytorchs(rows, size):
    """The error is at most twice PyTorch's in the same precision, beside what one number more in the last place is."""
    x = drawn(2, rows, size)
    exact = x.double().log_softmax(-1)
    theirs = (x.log_softmax(-1) - exact).abs().max()
    got = log_softmax_cpp(x.clone())
    assert (got - exact).abs().max() <= 2 * theirs + 2**-23 * exact.abs().max()


def test_it_is_written_in_place_and_nothing_beside_it():
    buffer = torch.full((5, 301), float("nan"))
    own = buffer[1:4]
    own[:] = drawn(3, 301)
    wanted = own.log_softmax(-1)
    assert log_softmax(own) is own
    torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-5)
    assert buffer[[0, 4]].isnan().all()


def test_numbers_that_are_not_there_have_no_share():
    """-inf stays and counts nothing, whole parts of it included; a row of nothing else is not a number, as in PyTorch."""
    x = drawn(3, 2 * PART)
    x[0, PART:] = x[1, :PART] = NONE
    x[2] = NONE
    wanted = x.log_softmax(-1)
    got = log_softmax_cpp(x.clone())
    assert got[2].isnan().all()
    assert wanted[2].isnan().all()
    torch.testing.assert_close(got[:2], wanted[:2], rtol=1e-6, atol=1e-5)


def test_what_is_not_a_number_shows():
    x = drawn(2, PART + 40)
    x[1, PART + 3] = float("nan")
    got = log_softmax_cpp(x.clone())
    assert got[1].isnan().all()
    assert not got[0].isnan().any()


def test_threads_change_no_bit():
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(log_softmax_cpp(drawn(5, 3 * PART + 5)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, found[0]) for x in found)


def test_others_are_pytorchs():
    """Other dtypes, layouts and gradients; they are not written over."""
    x = drawn(4, 50)
    for given in (x.double(), x.mT, x.clone().requires_grad_()):
        kept = given.detach().clone()
        assert torch.equal(log_softmax(given), given.log_softmax(-1))
        assert torch.equal(given, kept)
    assert log_softmax_cpp(torch.empty(3, 0)).shape == (3, 0)
