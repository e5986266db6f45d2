"""Products with packed codes in C++, against the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch

from semkv.kernels import codes as in_pytorch
from semkv.kernels.code_products.cpp import answers, code_norms_cpp, code_products_cpp
from semkv.kernels.codes import code_norms, code_products
from semkv.kernels.cpp import compiler

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++"),
    pytest.mark.usefixtures("filled_with_nan"),
]

NAN = float("nan")


def drawn(heads: int, rows: int, count: int, dim: int, bits: int):
    """(q, codes in a larger buffer, scale between NaN, the numbers in float64)."""
    generator = torch.Generator().manual_seed(count + dim)
    width, per = -(-dim * bits // 8), 8 // bits
    buffer = torch.randint(0, 256, (heads, count + 3, width + 1), generator=generator, dtype=torch.uint8)
    codes = buffer[:, :count, :width]
    plain = torch.stack([(codes >> (bits * place)) & ((1 << bits) - 1) for place in range(per)], -1).flatten(-2)
    scales = torch.full((heads, count, 2), NAN, dtype=torch.float16)
    scales[..., :1] = torch.rand(heads, count, 1, generator=generator) + 0.1
    q = torch.randn(heads, rows, dim, generator=generator)
    return q, codes, scales[..., :1], plain[..., :dim].double() - 2 ** (bits - 1)


def check(got: torch.Tensor, q: torch.Tensor, plain: torch.Tensor) -> None:
    """The root mean square of the error is at most twice that of a matrix product of the same numbers in float32."""
    exact = q.double() @ plain.mT
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    theirs = (q @ plain.float().mT - exact).square().mean().sqrt()
    assert (got - exact).square().mean().sqrt() <= 2 * theirs + 1e-7 * exact.square().mean().sqrt()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "count", "dim"), [(1, 1, 1), (2, 301, 16), (3, 63, 15), (7, 2050, 33), (4, 130, 128)])
def test_products(bits, rows, count, dim):
    """Of all rows, whatever is left of the last tile, byte and vector; with and without a scale."""
    q, codes, scale, plain = drawn(2, rows, count, dim, bits)
    check(code_products_cpp(q, codes, bits), q, plain)
    for given in (scale, scale.float() / 3, scale.expand(-1, -1, 2)[..., :1]):
        check(code_products_cpp(q, codes, bits, given), q, plain * given.double())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [1, 15, 16, 33, 128])
def test_norms(bits, dim):
    """Of whole bytes: what the last one has beyond the vector is 0 in what is quantised, and counts here."""
    dim = -(-dim * bits // 8) * 8 // bits
    _, codes, scale, plain = drawn(2, 1, 130, dim, bits)
    wanted = (plain * scale.double()).norm(dim=-1)
    torch.testing.assert_close(code_norms_cpp(codes, bits, scale).double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(code_norms(codes, bits, scale).double(), wanted, rtol=1e-6, atol=0)


def test_other_layouts_are_copied():
    q, codes, scale, plain = drawn(3, 2, 40, 24, 4)
    spread = torch.stack([codes, codes], -1)[..., 0]
    assert 1 not in spread.stride()
    check(code_products_cpp(q, spread, 4, scale), q, plain * scale.double())


def test_no_vectors():
    q, codes, scale, _ = drawn(2, 3, 0, 8, 4)
    assert code_products_cpp(q, codes, 4, scale).shape == (2, 3, 0)


def test_threads_change_no_bit():
    q, codes, scale, _ = drawn(2, 2, 9000, 16, 4)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(code_products_cpp(q, codes, 4, scale))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, found[0]) for x in found)


def test_what_it_answers(monkeypatch):
    q, codes, scale, plain = drawn(2, 3, 50, 16, 8)
    assert torch.equal(code_products(q, codes, 8, scale), code_products_cpp(q, codes, 8, scale))
    assert not answers(codes, scale, q.double())
    assert answers(codes, scale.float(), q)
    assert not answers(codes, scale.double(), q)
    assert not answers(codes, scale, q.clone().requires_grad_())
    assert not answers(codes.to("meta"), None, q.to("meta"))
    monkeypatch.setattr(in_pytorch, "answers", lambda *given: False)
    torch.testing.assert_close(
        code_products(q, codes, 8, scale).double(), q.double() @ (plain * scale.double()).mT, rtol=1e-4, atol=1e-2
    )
    torch.testing.assert_close(code_norms(codes, 8, scale), code_norms_cpp(codes, 8, scale))
