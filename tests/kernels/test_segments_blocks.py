"""Graphs in blocks: layers that are alike share what was made for one, and another size makes that anew which takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.kernels.cpp import compiler
from semkv.kernels.segments import Segment, blocks, whole

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("nothing_is_written_by_luck"),
]

LAYERS, WIDTH = 7, 37


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(x: Tensor, numbers: Tensor, *states: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Each layer writes to its state, reads all of it, and returns what it has read; the first input comes back at the end."""
    begun, seen = x * 3, []
    for place, state in enumerate(states):
        state[:1].copy_(x[:1])
        state[:, 1:3].mul_(numbers[place][0])
        weight = torch.softmax(x @ state.mT, -1)
        first, second = torch.split(weight @ state, [20, WIDTH - 20], -1)
        x = x + torch.cat([second.sin(), first.cos()], -1) / 2
        seen.append(weight.amax(-1) + second[..., 0])
    return x * begun, seen


def given(sizes: list[int]) -> list[Tensor]:
    return [
        drawn(5, WIDTH, seed=1),
        drawn(LAYERS, 2),
        *(drawn(size, WIDTH, seed=2 + n) for n, size in enumerate(sizes)),
    ]


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The recipes of each block that was made, in order."""
    found: list[int] = []
    real = blocks.Block._made
    monkeypatch.setattr(blocks.Block, "_made", lambda block, x: found.append(len(block.recipes)) or real(block, x))
    monkeypatch.setattr(blocks, "RECIPES", 12)
    return found


def traced(function, *inputs: Tensor) -> Segment:
    """With sizes of states that may be any."""
    return whole(make_fx(function, tracing_mode="real")(*[x.clone() for x in inputs]))


def check(segment: Segment, inputs: list[Tensor], function=layers) -> None:
    """It gives, and writes, what the function does."""
    own, others = [x.clone() for x in inputs], [x.clone() for x in inputs]
    with torch.no_grad():
        got, expected = segment(*own), function(*others)
    assert segment.reason is None
    torch.testing.assert_close(
        list(torch.utils._pytree.tree_leaves(got)), list(torch.utils._pytree.tree_leaves(expected))
    )
    torch.testing.assert_close(own, others)


def test_layers_that_are_alike_are_made_once(made):
    inputs = given([11] * LAYERS)
    segment = traced(layers, *inputs)
    check(segment, inputs)
    assert len(made) <= 4  # the first, one for all between, the last
    assert sum(made) < 3 * len(segment.module.graph.nodes) / LAYERS


def test_another_size_makes_those_blocks_anew_that_take_it(made):
    segment = traced(layers, *given([11] * LAYERS))
    check(segment, given([11] * LAYERS))
    made.clear()
    for place in (0, 3, LAYERS - 1):
        before = len(made)
        check(segment, given([11] * place + [13] + [11] * (LAYERS - place - 1)))
        assert len(made) <= before + 2, "a block reaches into the next layer"
    assert made
    made.clear()
    check(segment, given([13] * LAYERS))
    assert len(made) <= 2, "layers of this size were made before"
    made.clear()
    check(segment, given([11] * LAYERS))
    check(segment, given([11, 13, 13, 11, 13, 11, 11]))
    assert len(made) <= 1


@pytest.mark.parametrize("recipes", [1, 3, 12, 1000])
def test_blocks_of_any_size_compute_the_same(monkeypatch, recipes):
    """Every layer has another size, and sizes come again in another order."""
    monkeypatch.setattr(blocks, "RECIPES", recipes)
    sizes = [3, 17, 1, 40, 9, 2, 5]
    segment = traced(layers, *given(sizes))
    for turn in range(LAYERS):
        check(segment, given(sizes[turn:] + sizes[:turn]))


def test_pieces_are_kept_up_to_a_number(monkeypatch):
    monkeypatch.setattr(blocks, "RECIPES", 12)
    monkeypatch.setattr(blocks, "MOST_PIECES", 2)
    segment = traced(layers, *given([4] * LAYERS))
    for size in (4, 5, 6, 7, 4):
        check(segment, given([size] * LAYERS))
    known = segment._known.blocks
    assert known is not None
    assert all(len(block._pieces) <= 2 for block in known.blocks)


@pytest.mark.parametrize("recipes", [1, 2, 50])
def test_what_is_returned_twice_or_as_it_came(monkeypatch, recipes):
    """A value that is returned twice, a view of another, one of an input, and one that ends in a list."""
    monkeypatch.setattr(blocks, "RECIPES", recipes)

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        z = x * y
        return [z, z, z[1:, 3:], y[0], *torch.split(z + 1, [30, 7], -1)]

    x, y = drawn(3, WIDTH), drawn(3, WIDTH, seed=1)
    check(traced(function, x, y), [x, y], function)
