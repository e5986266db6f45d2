"""Vectors in 4 and 8 bits."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import ConfigError
from semkv.kernels import codes
from semkv.runtime.store.pairs import Pairs
from semkv.runtime.store.quantization import (
    bytes_per_vector,
    dequantize,
    norms,
    products,
    quantize,
)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_error_is_at_most_half_a_step(bits, dim):
    torch.manual_seed(0)
    x = torch.randn(3, 11, dim) * torch.logspace(-3, 3, 11)[:, None]
    packed = quantize(x, bits)
    top = 2 ** (bits - 1) - 1
    step = x.abs().amax(-1, keepdim=True) / top
    # The scale itself is rounded to half precision, one part in 2048 or 2**-25, and the largest code feels it `top` times.
    assert ((dequantize(packed) - x).abs() <= step * (0.5 + top / 2048) + top * 2**-25).all()
    assert packed.nbytes == 33 * bytes_per_vector(dim, bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantising_again_changes_nothing(bits):
    """Merging spans requantises the means of all others: they must not drift."""
    torch.manual_seed(1)
    once = dequantize(quantize(torch.randn(5, 40, 33), bits))
    assert torch.equal(dequantize(quantize(once, bits)), once)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_vectors_stay_zero(bits):
    assert torch.equal(dequantize(quantize(torch.zeros(2, 3, 5), bits)), torch.zeros(2, 3, 5))


def test_selecting_along_leading_dimensions():
    torch.manual_seed(2)
    packed = quantize(torch.randn(2, 9, 5), 4)
    assert torch.equal(dequantize(packed[:, 3:5]), dequantize(packed)[:, 3:5])


@pytest.mark.parametrize("lefts", [[0], [7], [3], [0, 2, 5, 7], [1, 3]])
@pytest.mark.parametrize("form", [4, 8, torch.float16, torch.int32])
def test_pairs_become_one_and_all_else_stays(lefts, form):
    """Against units put together one after the other."""
    torch.manual_seed(3)
    x, made = 9 * torch.randn(2, 9, 5), 9 * torch.randn(2, len(lefts), 5)
    held, new = (quantize(part, form) if isinstance(form, int) else part.to(form) for part in (x, made))
    pairs, wanted, number, numbers = Pairs(lefts), [], 0, []
    for unit in range(9):
        if unit - 1 in lefts:
            numbers.append(number - 1)
            continue
        wanted.append(dequantize(new[:, lefts.index(unit)] if unit in lefts else held[:, unit]))
        numbers.append(number)
        number += 1
    found = pairs.joined(held, made)
    assert torch.equal(dequantize(found), torch.stack(wanted, 1))
    assert pairs.numbers(9).tolist() == numbers
    first, second = pairs.of(held)
    assert torch.equal(first, torch.stack([dequantize(held[:, left]) for left in lefts], 1))
    assert torch.equal(second, torch.stack([dequantize(held[:, left + 1]) for left in lefts], 1))
    for rows in (1, 2):
        share = torch.rand(rows, len(lefts))
        plain = first * share[..., None] + second * (1 - share[..., None])
        assert torch.equal(pairs.mean(held, share), plain)


def test_heads_of_a_group_share_their_means():
    x, share = torch.randn(6, 4, 3), torch.tensor([[0.25], [0.5]])
    found = Pairs([1]).mean(x, share)
    for head in range(6):
        own = share[head // 3, 0]
        assert torch.equal(found[head, 0], x[head, 1] * own + x[head, 2] * (1 - own))


def test_other_widths_are_refused():
    with pytest.raises(ConfigError, match="bits 3: vectors are quantised to 4 or 8 bits"):
        quantize(torch.zeros(1, 4), 3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("heads", "rows", "vectors", "dim"),
    [(2, 3, 1000, 7), (8, 2, 700, 128), (1, 1, 5, 16), (3, 20, 17, 33), (2, 2, 0, 8)],
)
def test_products_and_lengths_of_codes_are_those_of_what_they_stand_for(bits, heads, rows, vectors, dim, monkeypatch):
    monkeypatch.setattr(codes, "TILE_NUMBERS", 1 << 14)  # several tiles
    torch.manual_seed(3)
    q, packed = torch.randn(heads, rows, dim), quantize(torch.randn(heads, max(1, vectors), dim), bits)[:, :vectors]
    whole = dequantize(packed).double()
    largest = float((q.abs().double() @ whole.abs().mT).max()) if vectors else 0.0
    torch.testing.assert_close(products(q, packed).double(), q.double() @ whole.mT, rtol=1e-5, atol=1e-6 * largest)
    torch.testing.assert_close(norms(packed).double(), whole.norm(dim=-1), rtol=1e-5, atol=0)
