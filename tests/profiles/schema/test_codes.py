"""Residual codebooks: what is nearest, what a code stands for, and codes of fewer stages."""

from __future__ import annotations

import torch

from semkv.profiles.schema.codes import VECTORS, Codebooks, nearest


def made(heads=2, stages=3, dim=5) -> Codebooks:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(heads, dim, dim, generator=generator)
    scale = 0.5 ** torch.arange(stages)[:, None, None]
    books = torch.randn(heads, stages, VECTORS, dim, generator=generator) * scale
    return Codebooks(torch.randn(heads, dim, generator=generator), books, root @ root.mT + torch.eye(dim))


def test_the_nearest_vector_is_that_of_all_distances():
    books = made()
    x = torch.randn(2, 40, 5)
    wanted = torch.cdist(x, books.books[:, 0]).argmin(-1)
    assert torch.equal(nearest(x, books.books[:, 0]), wanted)


def test_a_key_is_coded_stage_by_stage():
    books, k = made(), torch.randn(2, 30, 5)
    codes = books.encode(k)
    assert codes.shape == (2, 30, 3)
    assert codes.dtype == torch.uint8
    for head in range(2):
        for token in range(30):
            rest = (k[head, token] - books.mean[head]) @ books.root[head]
            for stage in range(3):
                book = books.books[head, stage]
                best = int((rest - book).norm(dim=-1).argmin())
                assert int(codes[head, token, stage]) == best
                rest = rest - book[best]
            found = books.decode(codes)[head, token]
            left = (k[head, token] - found) @ books.root[head]
            torch.testing.assert_close(left, rest, rtol=1e-3, atol=1e-3)


def test_each_stage_comes_nearer_in_products_with_queries():
    """The distance in the books' space is the mean square of products with queries of that second moment."""
    books, k = made(), 2 * torch.randn(2, 200, 5)
    queries = torch.randn(2, 4000, 5) @ books.root  # second moment root @ root
    exact, errors = queries @ k.mT, []
    for stages in (1, 2, 3):
        some = Codebooks(books.mean, books.books[:, :stages], books.root)
        guess = queries @ some.decode(some.encode(k)).mT
        errors.append(float((exact - guess).square().mean()))
    assert errors[0] > errors[1] > errors[2]


def test_averages_are_those_of_decoded_vectors():
    books = made()
    values = Codebooks(books.mean, books.books)
    codes = torch.randint(0, VECTORS, (2, 40, 3), dtype=torch.uint8)
    weights = torch.rand(2, 4, 40).softmax(-1)
    torch.testing.assert_close(values.average(weights, codes), weights @ values.decode(codes), rtol=1e-4, atol=1e-5)


def test_without_a_root_vectors_are_compared_as_they_are():
    books, x = made(), torch.randn(2, 30, 5)
    plain = Codebooks(books.mean, books.books)
    same = Codebooks(books.mean, books.books, torch.eye(5).expand(2, -1, -1))
    assert torch.equal(plain.encode(x), same.encode(x))
    q = torch.randn(2, 3, 5)
    wanted = q @ (plain.decode(plain.encode(x)) - plain.mean[:, None]).mT
    codes = plain.encode(x)
    got = sum(plain.tables(q)[:, :, s].gather(-1, codes[:, None, :, s].long().expand(-1, 3, -1)) for s in range(3))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_first_stages_of_a_code_are_a_code():
    books, k = made(), torch.randn(2, 30, 5)
    some = Codebooks(books.mean, books.books[:, :2], books.root)
    assert torch.equal(books.encode(k)[..., :2], some.encode(k))
