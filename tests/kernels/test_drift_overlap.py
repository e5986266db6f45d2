"""Drift overlap: the reference by hand, Triton against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.drift_overlap import drift_overlap_reference


def test_the_reference_by_hand():
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.4], [0.4, 0.3, 0.2, 0.1]])
    baseline = torch.tensor([[True, True, False, False], [False, False, False, True]])
    assert drift_overlap_reference(weights, baseline, 2).tolist() == [0.5, 0.0]
    assert drift_overlap_reference(weights, baseline, 4).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("tokens", "k"), [(63, 9), (111, 40)])
def test_the_kernel_equals_the_reference(on_device, tokens, k):
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.drift_overlap.triton import drift_overlap_triton

    generator = torch.Generator().manual_seed(k)
    before, after = ((torch.randn(2, tokens, generator=generator) * 4).round() for _ in range(2))  # with equal ones
    baseline = torch.zeros(2, tokens, dtype=torch.bool).scatter_(1, before.topk(k).indices, True)
    weights = before + after
    wanted = drift_overlap_reference(weights, baseline, k)
    assert 0 < wanted.min() <= wanted.max() < 1
    assert torch.equal(on_device(drift_overlap_triton, weights, baseline, k, block=64), wanted)


def test_a_baseline_of_another_shape_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.drift_overlap.triton import drift_overlap_launches

    with pytest.raises(InputError, match=r"baseline is torch\.bool \(1, 4\); expected torch\.bool \(1, 5\)"):
        drift_overlap_launches(torch.ones(1, 5), torch.ones(1, 4, dtype=torch.bool), 2)
