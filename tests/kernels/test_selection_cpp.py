"""Selection in C++ against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from semkv.kernels.cpp import compiler
from semkv.kernels.selection import select_reference
from semkv.kernels.selection.cpp import MAX_ALLOWANCE, select_cpp

pytestmark = pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")

NONE = float("-inf")


def made(kv_heads: int, group: int, tokens: int, units: int, kind: str, most: int):
    """Scores that are drawn, rounded so that many are equal, all in one binade, or of every size; some are absent."""
    generator = torch.Generator().manual_seed(units + most)
    score = torch.randn(kv_heads * group, tokens, units, generator=generator)
    if kind == "equal":
        score = score.round() * torch.where(
            torch.rand(score.shape, generator=generator) < 0.5, -1.0, 1.0
        )  # zeros of both signs
    if kind == "near":
        score = 1 + score.abs() * 1e-6
    if kind == "wide":
        score = score * 10 ** torch.randint(-44, 38, score.shape, generator=generator).float()
    score[torch.rand(score.shape, generator=generator) < 0.1] = NONE
    cost = torch.randint(0, most + 1, (kv_heads, units), generator=generator)
    return score, torch.randn(kv_heads * group, generator=generator) - 0.5, cost


@pytest.mark.parametrize("kind", ["drawn", "equal", "near", "wide"])
@pytest.mark.parametrize(("kv_heads", "group", "tokens", "units"), [(1, 1, 1, 1), (2, 3, 2, 63), (3, 1, 1, 500)])
def test_it_chooses_what_the_reference_chooses(kind, kv_heads, group, tokens, units):
    score, threshold, cost = made(kv_heads, group, tokens, units, kind, 9)
    for bound in (threshold, torch.full_like(threshold, NONE)):
        for allowance in (0, 1, 7, units, 3 * units, MAX_ALLOWANCE):
            for paid in (cost, None):
                costs = torch.ones_like(cost) if paid is None else paid
                wanted, chosen = select_reference(score, bound, costs.int(), allowance)
                found = select_cpp(score, bound, paid, allowance, kv_heads)
                assert torch.equal(found.chosen, chosen)
                assert torch.equal(found.taken, chosen.sum(1))
                assert found.differ == bool((chosen.repeat_interleave(group, 0)[:, None] & ~wanted).any())


def test_no_units():
    found = select_cpp(torch.zeros(4, 1, 0), torch.zeros(4), None, 3, 2)
    assert found.chosen.shape == (2, 0)
    assert not found.differ


def in_order(score, threshold, cost, allowance):
    """What a sort chooses, bool [Hkv, M]."""
    heads = len(cost)
    best = score.masked_fill(score <= threshold[:, None, None], NONE).unflatten(0, (heads, -1)).amax(dim=(1, 2))
    order = best.argsort(dim=1, descending=True, stable=True)
    fits = (cost.gather(1, order).cumsum(1) <= allowance) & (best.gather(1, order) > NONE)
    return torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, fits)


@pytest.mark.parametrize("kind", ["drawn", "equal", "near", "wide"])
@pytest.mark.parametrize("most", [1, 1000])
def test_many_units_and_threads(kind, most):
    """So many that a sample tells where the cut is."""
    score, threshold, cost = made(2, 2, 1, 20_011, kind, most)
    cost = cost.clamp(min=1)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for share in (0.0005, 0.05, 0.3, 0.9, 2):
                allowance = int(share * int(cost.sum(1).max()))
                paid = None if most == 1 else cost
                found = select_cpp(score, threshold, paid, allowance, 2)
                assert torch.equal(found.chosen, in_order(score, threshold, cost, allowance))
    finally:
        torch.set_num_threads(before)


def test_a_sample_that_misleads_is_not_believed():
    """All that is sampled is better than the rest, or costs nothing."""
    units = 16_384  # every eighth is sampled
    score = torch.randn(1, 1, units, generator=torch.Generator().manual_seed(1))
    score[..., ::8] += 100
    threshold, cost = torch.tensor([NONE]), torch.ones(1, units, dtype=torch.int64)
    for allowance in (100, 2047, 3000, 9000):
        found = select_cpp(score, threshold, None, allowance, 1)
        assert torch.equal(found.chosen, in_order(score, threshold, cost, allowance))
    cost[:, ::8] = 0
    found = select_cpp(score, threshold, cost, 50, 1)
    assert torch.equal(found.chosen, in_order(score, threshold, cost, 50))


def test_scores_in_any_layout():
    score, threshold, cost = made(2, 3, 4, 70, "drawn", 5)
    wanted = select_cpp(score, threshold, cost, 40, 2).chosen
    wider = torch.cat([score, score], 2)[..., :70]
    turned = score.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for layout in (wider, turned, score.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(select_cpp(layout, threshold, cost, 40, 2).chosen, wanted)
