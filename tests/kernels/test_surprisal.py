"""Surprisal: the reference against cross entropy, Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.surprisal import surprisal_reference


def made(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, *, biased: bool = False):
    generator = torch.Generator().manual_seed(tokens)
    h = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (3 * torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(dtype)
    bias = torch.randn(vocabulary, generator=generator).to(dtype) if biased else None
    return h, weight, torch.randint(0, vocabulary, (tokens,), generator=generator), bias


def test_the_reference_is_the_cross_entropy():
    h, weight, targets, bias = made(9, 15, 63, torch.float64, biased=True)
    wanted = torch.nn.functional.cross_entropy(h @ weight.T + bias, targets, reduction="none")
    torch.testing.assert_close(surprisal_reference(h, weight, targets, bias), wanted)
    capped = surprisal_reference(h, weight, targets, softcap=2.0)
    assert not torch.allclose(capped, wanted)
    assert capped.max() <= 4.0 + torch.log(torch.tensor(63.0))


CASES = [
    # tokens, hidden, vocabulary, dtype, bias, soft-cap, splits
    (17, 60, 111, torch.float32, False, 0.0, 3),
    (63, 64, 63, torch.float32, True, 4.0, 1),
    (1, 33, 200, torch.float16, False, 0.0, 8),
    (16, 48, 97, torch.bfloat16, True, 0.0, 4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_the_reference(on_device, case):
    """The error against float64 is at most twice that of the reference in the same dtype."""
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.surprisal.triton import Configuration, surprisal_triton

    tokens, hidden, vocabulary, dtype, biased, softcap, splits = case
    h, weight, targets, bias = made(tokens, hidden, vocabulary, dtype, biased=biased)
    sides = Configuration(tokens=16, vocabulary=16, hidden=32, splits=splits)
    got = on_device(surprisal_triton, h, weight, targets, bias, softcap=softcap, configuration=sides)
    wide = None if bias is None else bias.double()
    exact = surprisal_reference(h.double(), weight.double(), targets, wide, softcap=softcap)
    plain = surprisal_reference(h, weight, targets, bias, softcap=softcap)
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_what_cannot_be_launched_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.surprisal.triton import surprisal_launches

    h, weight, targets, _ = made(3, 8, 5, torch.float64)
    with pytest.raises(InputError, match=r"hidden is torch\.float64"):
        surprisal_launches(h, weight, targets)
    with pytest.raises(InputError, match="hidden has 7 numbers a token and weight 8"):
        surprisal_launches(h[:, :7].float(), weight.float(), targets)
