"""Units of different sizes are taken in order of score until one does not fit, whether or not all of them were sorted."""

import pytest
import torch

from semkv.runtime.choosing import in_order


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
