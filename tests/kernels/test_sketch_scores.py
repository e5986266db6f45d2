"""Sums of what codes look up: the reference against decoded keys, C++ and Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.cpp import compiler
from semkv.kernels.sketch_scores import sketch_logits, sketch_logits_reference
from semkv.kernels.sketch_scores.cpp import sketch_logits_cpp
from semkv.profiles.schema.codes import Codebooks
from tests.conftest import quick_ones

CASES = [
    # stages, kv heads, rows, dim, units
    (1, 1, 1, 60, 63),
    (2, 2, 4, 64, 111),
    (3, 1, 5, 128, 1),
    (4, 1, 20, 64, 33),  # several groups and blocks of rows
    (4, 2, 8, 16, 4100),  # two parts
    (7, 2, 2, 15, 17),
]


def made(stages: int, kv_heads: int, rows: int, dim: int, units: int) -> tuple[torch.Tensor, torch.Tensor, Codebooks]:
    """(queries, codes, books), all drawn."""
    generator = torch.Generator().manual_seed(stages + units)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    root = numbers(kv_heads, dim, dim)
    books = Codebooks(
        numbers(kv_heads, dim), numbers(kv_heads, stages, 256, dim), root @ root.mT / dim + torch.eye(dim)
    )
    codes = torch.randint(0, 256, (kv_heads, units, stages), generator=generator, dtype=torch.uint8)
    return numbers(kv_heads, rows, dim), codes, books


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_products_with_decoded_keys(case):
    """But for the mean's, which is one number for all keys."""
    q, codes, books = made(*case)
    got = sketch_logits_reference(books.tables(q), codes)
    wanted = q.double() @ (books.decode(codes) - books.mean[:, None]).double().mT
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")
def test_the_kernel_in_cpp_adds_the_same_numbers(case):
    q, codes, books = made(*case)
    tables = books.tables(q)
    spare = torch.randint(0, 256, (case[1], case[4] + 3, case[0]), dtype=torch.uint8)
    spare[:, : case[4]] = codes
    for given in (codes, spare[:, : case[4]], codes.mT.contiguous().mT):
        assert torch.equal(sketch_logits_cpp(tables, given), sketch_logits_reference(tables, codes))
    assert torch.equal(sketch_logits(tables, codes), sketch_logits_reference(tables, codes))


def test_where_there_is_no_kernel_pytorch_adds():
    q, codes, books = made(*CASES[1])
    tables = books.tables(q).double()
    assert torch.equal(sketch_logits(tables, codes), sketch_logits_reference(tables, codes))


@pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")
def test_threads_change_no_bit():
    q, codes, books = made(*CASES[4])
    tables, before = books.tables(q), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(sketch_logits_cpp(tables, codes))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("case", quick_ones(CASES, [case for case in CASES if case[4] < 1000]), ids=str)
def test_the_kernel_in_triton_gives_log_probabilities(on_device, case):
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.sketch_scores.triton import sketch_scores_triton

    q, codes, books = made(*case)
    tables = books.tables(q)
    got = on_device(sketch_scores_triton, tables, codes, block=32)
    exact, single = (sketch_logits_reference(x, codes).log_softmax(-1) for x in (tables.double(), tables))
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    assert float((got - exact).abs().max()) <= 2 * float((single - exact).abs().max()) + 2e-6 * float(exact.abs().max())


def test_codes_of_other_tables_are_refused():
    q, codes, books = made(*CASES[1])
    tables = books.tables(q)
    if compiler() is not None:
        with pytest.raises(
            InputError, match=r"tables \(2, 4, 2, 256\) for codes \(2, 111, 1\); expected as many heads"
        ):
            sketch_logits_cpp(tables, codes[..., :1])
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.sketch_scores.triton import sketch_scores_launches

    with pytest.raises(
        InputError, match=r"codes are torch\.int64 \(2, 111, 2\); expected torch\.uint8 \(2, units, 2\)"
    ):
        sketch_scores_launches(tables, codes.long())
    with pytest.raises(InputError, match=r"expected torch\.uint8 \(2, units, 2\) for the heads and stages"):
        sketch_scores_launches(tables, codes[..., :1])
