"""Codes of vectors in residual codebooks in C++."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from semkv.errors import InputError
from semkv.kernels.cpp import compiler
from semkv.kernels.residual_codes.cpp import residual_codes_cpp, residual_codes_here
from semkv.profiles.schema.codes import VECTORS, Codebooks

pytestmark = pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")

SIZES = [(1, 1, 1, 1), (2, 0, 3, 8), (3, 7, 4, 32), (2, 67, 2, 33), (1, 130, 5, 17), (4, 66, 8, 64), (1, 5, 16, 100)]
"""Heads, vectors, stages, dims."""


def drawn(heads: int, count: int, stages: int, dim: int, *, whole: bool = False) -> tuple[Tensor, Codebooks]:
    """Vectors, and books whose vectors get shorter by stage; whole: small integers, of which every sum is exact."""
    generator = torch.Generator().manual_seed(heads + count + stages + dim)
    x = torch.randn(heads, count, dim, generator=generator)
    books = torch.randn(heads, stages, VECTORS, dim, generator=generator)
    if whole:
        x, books = (4 * x).round(), books.round()
    else:
        books = books / 2.0 ** torch.arange(stages)[:, None, None]
    return x, Codebooks(torch.zeros(heads, dim), books)


def coded(books: Codebooks, x: Tensor) -> Tensor:
    return residual_codes_cpp(books.inward(x), books.books, books.biases)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_codes_of_whole_numbers_are_those_of_pytorch(sizes):
    """Ties among them, of which the first is taken."""
    x, books = drawn(*sizes, whole=True)
    assert residual_codes_here(x, books.books)
    assert torch.equal(coded(books, x), books.encode(x))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_stage_takes_a_nearest_vector(sizes):
    """By distances in float64 from what the codes before leave, to the rounding of float32."""
    x, books = drawn(*sizes)
    codes, rest = coded(books, x).long(), x.double()
    assert codes.shape == (*x.shape[:2], books.stages)
    for stage, book in enumerate(books.books.double().unbind(1)):
        distances = torch.cdist(rest, book)
        taken = distances.gather(-1, codes[..., stage, None])
        assert (taken <= distances.amin(-1, keepdim=True) * (1 + 1e-5) + 1e-5).all()
        rest = rest - torch.take_along_dim(book, codes[..., stage, None], 1)


def test_threads_and_neighbours_change_no_code():
    x, books = drawn(2, 333, 4, 24)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([coded(books, x[:, n : n + 1]) for n in range(x.shape[1])], 1)
        torch.set_num_threads(3)
        assert torch.equal(coded(books, x), alone)
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_a_number_gets_a_code():
    """As in PyTorch the first one, and the vectors beside it their own."""
    x, books = drawn(2, 9, 3, 20)
    clean = coded(books, x)
    x[1, 4, 7] = float("nan")
    found = coded(books, x)
    assert found[1, 4].tolist() == books.encode(x)[1, 4].tolist() == [0, 0, 0]
    clean[1, 4] = found[1, 4]
    assert torch.equal(found, clean)


def test_vectors_that_lie_apart_and_a_space_of_their_own():
    x, books = drawn(2, 21, 4, 12, whole=True)
    root = torch.randint(-2, 3, (2, 20, 12), generator=torch.Generator().manual_seed(1)).float()
    inside = Codebooks(torch.ones(2, 20), books.books, root)
    wide = torch.randint(-4, 5, (2, 20, 21), generator=torch.Generator().manual_seed(2)).float().mT
    assert not wide.is_contiguous()
    assert torch.equal(coded(inside, wide), inside.encode(wide))
    assert torch.equal(coded(books, x.mT.contiguous().mT), books.encode(x))


def test_where_it_is_not_asked():
    x, books = drawn(2, 3, 2, 8)
    assert not residual_codes_here(x, books.books[:, :, :100].contiguous())
    assert not residual_codes_here(x, books.books[:, :1])
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert not residual_codes_here(fake, books.books)
    with pytest.raises(InputError, match="books"):
        residual_codes_cpp(x, books.books[:, :1].expand(-1, 2, -1, -1), books.biases)
