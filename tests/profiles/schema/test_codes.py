"""Codes in few bits: levels are bounded, and the error is that of the best uniform quantiser."""

import pytest
import torch

from semkv.profiles.schema.codes import STEPS, decode, encode

DISTORTION = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154}  # Max 1960, Table II: mean squared error, unit variance


@pytest.mark.parametrize("bits", DISTORTION)
def test_the_error_on_a_normal_variable_is_the_known_one(bits):
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([[0.0, 5.0]]), torch.tensor([[1.0, 3.0]])
    codes = mean[:, None] + std[:, None] * torch.randn(1, 200_000, 2, generator=generator)
    levels = encode(codes, mean, std, bits)
    assert levels.dtype == torch.int8
    assert int(levels.min()) == -(2 ** (bits - 1))
    assert int(levels.max()) == 2 ** (bits - 1) - 1
    error = ((decode(levels, mean, std, bits) - codes) / std[:, None]).square().mean((0, 1))
    torch.testing.assert_close(error, torch.full((2,), DISTORTION[bits]), rtol=0.02, atol=0)


def test_eight_bits_fit_an_int8_and_a_still_dimension_stays_finite():
    codes = torch.tensor([[[-1e9, 2.0], [1e9, 2.0]]])
    mean, std = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0]])
    levels = encode(codes, mean, std, 8)
    assert levels[0, :, 0].tolist() == [-128, 127]
    assert torch.isfinite(decode(levels, mean, std, 8)).all()


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match=r"bits is 9, expected 1 to 8"):
        encode(torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.ones(1, 1), 9)
    assert sorted(STEPS) == list(range(1, 9))
