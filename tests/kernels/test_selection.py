"""Selection under a budget: the reference against a sort, Triton against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.selection import select_reference

NONE = float("-inf")


def made(kv_heads: int, group: int, tokens: int, units: int, *, cost: int = 9, seed: int = 0, ties: bool = False):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(kv_heads * group, tokens, units, generator=generator) * 10
    score = score.round() if ties else score
    score[torch.rand(score.shape, generator=generator) < 0.1] = NONE
    threshold = torch.randn(kv_heads * group, generator=generator)
    costs = torch.randint(0 if cost > 1 else 1, cost + 1, (kv_heads, units), generator=generator, dtype=torch.int32)
    return score, threshold, costs


def test_without_a_threshold_and_with_equal_costs_it_is_top_k():
    score, _, cost = made(2, 3, 2, 63, cost=1)
    zoom, chosen = select_reference(score, torch.full((6,), NONE), cost, 7)
    best = score.view(2, 6, 63).amax(1)
    assert torch.equal(chosen, torch.zeros(2, 63, dtype=torch.bool).scatter_(1, best.topk(7).indices, True))
    assert torch.equal(zoom, chosen.repeat_interleave(3, 0)[:, None] & (score > NONE))


def test_the_cap_is_held_and_the_next_unit_would_break_it():
    score, threshold, cost = made(3, 2, 1, 111)
    _, chosen = select_reference(score, threshold, cost, 100)
    above = score.masked_fill(score <= threshold[:, None, None], NONE)
    for head in range(3):
        best = above[2 * head : 2 * head + 2].amax((0, 1))
        spent = int(cost[head][chosen[head]].sum())
        following = best.masked_fill(chosen[head], NONE).argmax()
        assert spent <= 100 < spent + int(cost[head, following])
        assert best[chosen[head]].min() >= best[following]


CASES = [
    # kv heads, group, tokens, units, cost, ties, allowance
    (2, 4, 1, 63, 9, False, 60),
    (1, 5, 3, 63, 9, True, 120),  # more rows than are read at once, equal scores
    (2, 1, 1, 33, 1, True, 5),
    (1, 4, 1, 40, 9, False, 0),
    (1, 2, 1, 40, 9, True, 10**6),  # all fit
    (1, 1, 1, 1, 3, False, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_chooses_what_the_reference_chooses(on_device, case):
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.selection.triton import select_triton

    kv_heads, group, tokens, units, most, ties, allowance = case
    score, threshold, cost = made(kv_heads, group, tokens, units, cost=most, ties=ties)
    wanted = select_reference(score, threshold, cost, allowance)
    got = on_device(select_triton, score, threshold, cost, allowance, block=32)
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(got[0], wanted[0])


def test_keys_keep_the_order_of_scores(on_device):
    """Zeros of both signs are equal, the smallest and the largest numbers at their ends; absent ones are never chosen."""
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.selection.triton import select_triton

    top = torch.finfo(torch.float32).max
    score = torch.tensor([[[-0.0, 0.0, -1.5, top, -top, 1e-30, NONE, -1e-30, 0.0]]])
    cost = torch.ones(1, 9, dtype=torch.int32)
    for allowance in (1, 4, 7):
        wanted = select_reference(score, torch.tensor([NONE]), cost, allowance)
        got = on_device(select_triton, score, torch.tensor([NONE]), cost, allowance, block=16)
        assert torch.equal(got[1], wanted[1]), allowance


def test_what_cannot_be_launched_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.selection.triton import select_launches

    score, threshold, cost = made(2, 2, 1, 5)
    with pytest.raises(InputError, match=r"score is torch\.float64 and cost torch\.int32"):
        select_launches(score.double(), threshold, cost, 5)
    with pytest.raises(InputError, match="3 query heads for 2 KV heads"):
        select_launches(score[:3], threshold, cost, 5)
    with pytest.raises(InputError, match="allowance is -1; expected 0 to"):
        select_launches(score, threshold, cost, -1)
