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
                found, differ = select_cpp(score, bound, paid, allowance, kv_heads)
                assert torch.equal(found, chosen)
                assert differ == bool((chosen.repeat_interleave(group, 0)[:, None] & ~wanted).any())


def test_no_units():
    chosen, differ = select_cpp(torch.zeros(4, 1, 0), torch.zeros(4), None, 3, 2)
    assert chosen.shape == (2, 0)
    assert not differ


def test_many_units_and_threads():
    score, threshold, cost = made(2, 2, 1, 20_000, "equal", 1000)
    order = score.masked_fill(score <= threshold[:, None, None], NONE).view(2, 2, -1).amax(1)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            chosen, _ = select_cpp(score, threshold, cost, 2_000_000, 2)
            for head in range(2):
                best = order[head].argsort(descending=True, stable=True)
                fits = (cost[head, best].cumsum(0) <= 2_000_000) & (order[head, best] > NONE)
                assert torch.equal(chosen[head].nonzero()[:, 0], best[fits].sort().values)
    finally:
        torch.set_num_threads(before)
