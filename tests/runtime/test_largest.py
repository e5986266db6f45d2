"""The largest of each row are those that sorting gives, however the numbers lie."""

import pytest
import torch

from semkv.runtime.decode.largest import SAMPLED_FROM, STRIDE, largest


def rows(kind: str, count: int) -> torch.Tensor:
    """Three rows of `count` numbers: drawn, with many equal ones, ascending, half of them -inf, or large where no sample is taken."""
    x = torch.randn(3, count, generator=torch.Generator().manual_seed(count))
    if kind == "equal":
        return x.round()
    if kind == "ascending":
        return x.sort(dim=1).values
    if kind == "absent":
        x[:, count // 2 :] = float("-inf")
    if kind == "unsampled":
        x[:, 1::STRIDE] += 9
    return x


@pytest.mark.parametrize("kind", ["drawn", "equal", "ascending", "absent", "unsampled"])
@pytest.mark.parametrize("count", [1, 7, SAMPLED_FROM - 1, SAMPLED_FROM, 3 * SAMPLED_FROM + 5])
def test_the_chosen_are_as_many_as_asked_and_none_is_smaller_than_one_left_out(kind, count):
    x = rows(kind, count)
    for wanted in sorted({0, 1, count // 100, count // 3, count - 1, count}):
        chosen = largest(x, wanted)
        assert chosen.sum(1).tolist() == [wanted] * 3
        if 0 < wanted < count:
            assert bool(
                (x.masked_fill(~chosen, float("inf")).amin(1) >= x.masked_fill(chosen, float("-inf")).amax(1)).all()
            )
