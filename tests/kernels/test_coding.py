"""Codes of vectors in C++, to the bit those of PyTorch."""

from __future__ import annotations

import pytest
import torch

from semkv.kernels.coding.cpp import coded_cpp, codes_here
from semkv.runtime.store.quantization import quantize, quantize_plain

SIZES = [(1, 1), (3, 7), (2, 5, 16), (2, 0, 8), (2, 3, 64), (1, 2049, 33), (4, 3, 100)]


def vectors(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of sizes from below what float16 has to beyond it, with zeros, ties and signs."""
    torch.manual_seed(sum(shape))
    x = torch.randn(shape) * 10.0 ** torch.randint(-9, 8, (*shape[:-1], 1))
    x[torch.rand(shape) < 0.1] = 0
    x.flatten()[: x.numel() // 5].round_()
    return x.to(dtype)


def same(x: torch.Tensor, bits: int) -> None:
    codes, scale = coded_cpp(x, bits)
    wanted = quantize_plain(x, bits)
    assert torch.equal(codes, wanted.codes)
    assert torch.equal(scale.view(torch.int16), wanted.scale.view(torch.int16))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SIZES)
def test_codes_are_those_of_pytorch(shape, bits):
    same(vectors(shape), bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    same(vectors((3, 17, 24), dtype), 8)


def test_every_scale_of_half_precision():
    """The largest numbers give each positive float16 and the ones half-way between two, times 7."""
    halves = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).double()
    between = (halves[1:] + halves[:-1]) / 2
    same(torch.cat([halves, between]).mul(7).float()[:, None] * torch.tensor([1.0, -0.5, 0.499, 0.25]), 4)


def test_ties_go_to_the_even_code():
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert (coded_cpp(x, 8)[0].int() - 128).tolist() == [[127, 9, 27, 45, -9, -27, -45]]
    codes = coded_cpp(x, 4)[0]
    assert (torch.stack([codes & 15, codes >> 4], -1).flatten().int() - 8).tolist() == [7, 0, 2, 2, 0, -2, -2, 0]


def test_what_lies_apart_or_has_no_number():
    x = vectors((6, 9, 16))
    same(x.transpose(0, 1), 8)
    same(x[:, ::2, 3:14], 4)
    x[2, 3, 4], x[1, 1, 1] = float("nan"), float("inf")
    found = quantize(x, 8)
    assert found.scale[2, 3].isnan()
    assert found.scale.isnan().sum() == 1
    assert torch.equal(found.scale[1, 1].float(), torch.tensor([65504.0]))
    assert int(found.codes[1, 1, 1]) == 255


def test_threads_change_nothing():
    x, threads = vectors((5, 2100, 24)), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        same(x, 8)
    finally:
        torch.set_num_threads(threads)


def test_where_the_kernel_computes_them():
    assert codes_here(torch.zeros(2, 3))
    assert not codes_here(torch.zeros(2, 3, device="meta"))
    assert not codes_here(torch.nn.Parameter(torch.zeros(2, 3)))
