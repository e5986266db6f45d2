"""Calls of several rows as one: what each of them returns alone, whatever their own inputs are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.kernels.cpp import compiler
from semkv.kernels.segments import Behind, Segment, Standing, Together, whole

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

HEADS, DIM = 3, 20


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def attended(q: Tensor, number: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of a row's query [1, H, 1, D], and a sum over its weights; `k` counts how often it was read."""
    k[:, :, 0, 0].add_(1.0)
    weights = ((q * k).sum(-1) * number).softmax(-1)  # in words that hold for every length
    return (weights[..., None] * v).sum(2, keepdim=True), weights.square().sum((1, 2))[:, None]


def rows_of(count: int, tokens: list[int]) -> tuple[Segment, list[Tensor], list[Behind]]:
    segment = whole(
        make_fx(attended)(drawn(1, HEADS, 1, DIM), torch.ones(1), drawn(1, HEADS, 11, DIM), drawn(1, HEADS, 11, DIM))
    )
    numbers = [torch.full((1,), 0.1 * (row + 1)) for row in range(count)]
    behind = [
        Behind([drawn(1, HEADS, n, DIM, seed=row + 1), drawn(1, HEADS, n, DIM, seed=row + 50)])
        for row, n in enumerate(tokens)
    ]
    return segment, numbers, behind


def copied(behind: Behind) -> list[Tensor]:
    return [x.clone() for x in behind]


@torch.no_grad()
def test_each_row_is_what_it_is_alone(filled_with_nan):
    """Several steps, in which its own inputs change in place, over queries that are no dense tensor; to the bit."""
    segment, numbers, behind = rows_of(3, [11, 11, 11])
    standing, alone, together = list[Standing](), [copied(x) for x in behind], Together()
    for step in range(4):
        q = drawn(3, 2 * HEADS, 1, DIM, seed=100 + step)[:, ::2]
        rows = q.split(1)
        for row, own in enumerate(behind):
            if step == 0:
                made = Standing.of(segment.another(), [rows[row]], [numbers[row]], own)
                assert made is not None
                standing.append(made)
            assert standing[row].stands(own)
        numbers[1].fill_(0.3 + step)
        found = together(standing, [q])
        assert found is not None
        for row, own in enumerate(alone):
            wanted = segment(rows[row], numbers[row], *own)
            assert segment.reason is None
            assert all(torch.equal(x[row : row + 1], y) for x, y in zip(found, wanted))
            assert all(torch.equal(x, y) for x, y in zip(own, behind[row])), "written in place"


@torch.no_grad()
def test_rows_of_other_lengths_are_one_call_too():
    """Each has instructions of its own, and scratch is that of the largest."""
    lengths = [1, 300, 17, 2]
    segment, numbers, behind = rows_of(4, lengths)
    q = drawn(4, HEADS, 1, DIM, seed=7)
    calls = [Standing.of(segment.another(), [q[r : r + 1]], [numbers[r]], behind[r]) for r in range(4)]
    alone = [copied(x) for x in behind]
    found = Together()(calls, [q])
    for row, own in enumerate(alone):
        wanted = segment(q[row : row + 1], numbers[row], *own)
        assert all(torch.equal(x[row : row + 1], y) for x, y in zip(found, wanted))


@torch.no_grad()
def test_a_call_stands_while_its_inputs_do():
    segment, numbers, behind = rows_of(1, [11])
    q = drawn(1, HEADS, 1, DIM)
    call = Standing.of(segment, [q], numbers, behind[0])
    assert call.stands(behind[0])
    assert segment.reason is None
    other = Behind(behind[0])
    assert not call.stands(other)
    behind.clear()
    assert not call.stands(other), "nor is a list that is gone another one"


@torch.no_grad()
def test_what_one_call_does_not_answer_is_said():
    segment, numbers, behind = rows_of(2, [11, 11])
    q = drawn(2, HEADS, 1, DIM)
    calls = [Standing.of(segment.another(), [q[r : r + 1]], [numbers[r]], behind[r]) for r in range(2)]
    assert Together()(calls, [drawn(2, HEADS, 1, 2 * DIM)[..., ::2]]) is None, "rows that lie in another way"
    with torch.enable_grad():
        assert Together()(calls, [q]) is None
    wide = [x.double() for x in (q[:1], numbers[0], *behind[0])]
    assert Standing.of(segment, wide[:1], wide[1:2], Behind(wide[2:])) is None, "no instructions for float64"
    fewer = whole(make_fx(lambda q, number, k, v: (q * number, k.sum()))(q[:1], numbers[0], *behind[0]))
    assert Standing.of(fewer, [q[:1]], [numbers[0]], behind[0]) is None, "an output that is no row"
    other = whole(make_fx(lambda q, number, k, v: (q * number, (k * v).sum((1, 2))))(q[:1], numbers[0], *behind[0]))
    odd = Standing.of(other, [q[:1]], [numbers[0]], behind[0])
    assert odd is not None
    assert Together()([calls[1], odd], [q]) is None, "outputs of other sizes"
