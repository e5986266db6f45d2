"""Products with packed codes, against the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch

import semkv.kernels.codes as module
from semkv.errors import InputError
from semkv.kernels.codes import code_bits, code_products, code_sums, rebuilt


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_codes(bits, monkeypatch):
    """In PyTorch; `test_code_products_cpp.py` has those in C++."""
    monkeypatch.setattr(module, "answers", lambda *given: False)
    monkeypatch.setattr(module, "TILE_NUMBERS", 1 << 10)
    torch.manual_seed(4)
    width, per = 3, 8 // bits
    codes, q = torch.randint(0, 256, (2, 301, width), dtype=torch.uint8), torch.randn(2, 3, width * per - per // 2)
    plain = torch.stack([(codes >> (bits * place)) & ((1 << bits) - 1) for place in range(per)], -1).flatten(-2)
    plain = (plain.double() - 2 ** (bits - 1))[..., : q.shape[-1]]
    got = code_products(q, codes, bits)
    torch.testing.assert_close(got.double(), q.double() @ plain.mT, rtol=1e-5, atol=1e-6 * 2**bits * width * per)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("heads", "rows", "count", "dim"), [(2, 3, 301, 7), (1, 1, 1, 1), (3, 20, 17, 33), (2, 2, 0, 8)]
)
def test_weighted_sums_of_codes(bits, dtype, heads, rows, count, dim, monkeypatch):
    monkeypatch.setattr(module, "TILE_NUMBERS", 1 << 10)  # several tiles
    torch.manual_seed(5)
    codes = torch.randint(0, 256, (heads, count, -(-dim * bits // 8)), dtype=torch.uint8)
    weights = torch.rand(heads, rows, count, dtype=dtype)
    plain = codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :dim]
    wanted = weights.double() @ (plain.double() - 2 ** (bits - 1))
    torch.testing.assert_close(
        code_sums(weights, codes, bits, dim).double(), wanted, rtol=1e-5, atol=1e-6 * 2**bits * count
    )


def test_bits_follow_from_the_width():
    codes = torch.zeros(2, 5, 8, dtype=torch.uint8)
    assert [code_bits(codes, dim) for dim in (8, 15, 16)] == [8, 4, 4]
    with pytest.raises(
        InputError, match=r"codes are torch\.uint8 with 8 bytes a vector; expected torch\.uint8 with 17 \(8 bits\) or 9"
    ):
        code_bits(codes, 17)
    with pytest.raises(InputError, match=r"codes are torch\.float32 with 8 bytes"):
        code_bits(codes.float(), 8)


def test_what_codes_stand_for():
    codes, scale = torch.tensor([[0x0F, 0x08]], dtype=torch.uint8), torch.tensor([[0.5]], dtype=torch.float16)
    assert rebuilt(codes, scale, 8, 2).tolist() == [[-56.5, -60.0]]
    assert rebuilt(codes, scale, 4, 3).tolist() == [[3.5, -4.0, 0.0]]
