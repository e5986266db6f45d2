"""Span summaries: the reference against what the runtime folds, Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.span_summaries import span_summaries_reference
from semkv.runtime.store.segments import Cut

LENGTHS = torch.tensor([1, 31, 7, 16, 8])
STARTS = LENGTHS.cumsum(0) - LENGTHS


def made(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dim)
    surprisal = torch.rand(63, generator=generator)
    surprisal[32:39] = 0  # all of the third span
    return torch.randn(2, 63, dim, generator=generator).to(dtype), surprisal


@pytest.mark.parametrize("weighted", [False, True])
def test_the_reference_is_what_the_runtime_folds(weighted):
    x, surprisal = made(15, torch.float32)
    cut = Cut(torch.arange(63), surprisal, LENGTHS)
    mean, low, high = span_summaries_reference(x, STARTS, LENGTHS, surprisal if weighted else None)
    torch.testing.assert_close(mean, cut.mean(x, cut.surprisal_weights if weighted else None))
    assert torch.equal(low, cut.smallest(x))
    assert torch.equal(high, cut.largest(x))


@pytest.mark.parametrize(
    ("dim", "dtype", "weighted", "bounds"),
    [(60, torch.float32, True, True), (128, torch.float16, False, True), (64, torch.bfloat16, True, False)],
)
def test_the_kernel_equals_the_reference(on_device, dim, dtype, weighted, bounds):
    """Bounds are the same bits; the mean's error against float64 is at most twice that of the reference in float32."""
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.span_summaries.triton import span_summaries_triton

    x, surprisal = made(dim, dtype)
    weights = surprisal if weighted else None
    mean, low, high = on_device(span_summaries_triton, x, STARTS, LENGTHS, weights, bounds=bounds)
    exact, plain = (
        span_summaries_reference(x.double(), STARTS, LENGTHS, weights),
        span_summaries_reference(x, STARTS, LENGTHS, weights),
    )
    assert mean.dtype == torch.float32
    assert (mean - exact[0]).abs().max() <= 2 * (plain[0] - exact[0]).abs().max()
    if bounds:
        assert torch.equal(low, plain[1])
        assert torch.equal(high, plain[2])
    else:
        assert low is None
        assert high is None


def test_what_cannot_be_launched_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.span_summaries.triton import span_summaries_launches

    with pytest.raises(InputError, match=r"x is torch\.float64; the kernel reads float16"):
        span_summaries_launches(torch.zeros(1, 3, 2, dtype=torch.float64), torch.tensor([0]), torch.tensor([3]))
