"""Units of different sizes are taken in order of score until one does not fit, whether or not all of them were sorted."""

from types import SimpleNamespace

import pytest
import torch

from semkv.kernels.cpp import compiler
from semkv.runtime.decode import choosing
from semkv.runtime.decode.choosing import choose_units, in_order


def naive(best, costs, room):
    """One unit at a time."""
    chosen = torch.zeros_like(best, dtype=torch.bool)
    for head in range(len(best)):
        spent = 0
        for unit in best[head].argsort(descending=True).tolist():
            spent += int(costs[head, unit])
            if spent > room or best[head, unit] == float("-inf"):
                break
            chosen[head, unit] = True
    return chosen


@pytest.mark.parametrize("room", [0, 5, 300, 4000, 10**6, float("inf")])
@pytest.mark.parametrize("short_first", [False, True])
def test_units_are_taken_in_order_until_one_does_not_fit(room, short_first):
    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(1, 60, (3, 500), generator=generator)
    best = -costs + torch.rand(3, 500, generator=generator) if short_first else torch.randn(3, 500, generator=generator)
    best[0, 1:] = float("-inf")
    most = int(min(500, room // int(costs.min())))
    assert torch.equal(in_order(best, costs, room, most), naive(best, costs, room))


@pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("allowance", [0.0, 1000.5, float("inf")])
def test_both_forms_choose_the_same(fill, equal, allowance, monkeypatch):
    """In C++ and in PyTorch, with a threshold and without, for units of one size and of several."""
    generator = torch.Generator().manual_seed(1)
    score = torch.randn(6, 2, 200, generator=generator)
    score[:, :, :20] = float("-inf")
    costs = torch.full((2, 200), 9) if equal else torch.randint(1, 60, (2, 200), generator=generator)
    spans = SimpleNamespace(unit_nbytes=lambda: costs, unit_nbytes_range=(int(costs.min()), int(costs.max())))
    router = SimpleNamespace(threshold=lambda site: torch.linspace(-1, 1, 6))
    site = SimpleNamespace(kv_heads=2, group_size=3, q_heads=6)
    given = SimpleNamespace(fill=fill, router=router), spans, site, score, allowance
    fast = choose_units(*given)
    monkeypatch.setattr(choosing, "answers", lambda score: False)
    plain = choose_units(*given)
    assert torch.equal(fast.chosen, plain.chosen)
    assert torch.equal(fast.heads, plain.heads)
    assert (fast.own is None) == (plain.own is None)
