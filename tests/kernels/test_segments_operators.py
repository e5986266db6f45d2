"""Operators of ATen as instructions, in all dtypes that occur, beside PyTorch."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.kernels.cpp import compiler
from semkv.kernels.segments import whole

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("nothing_is_written_by_luck"),
]
aten = torch.ops.aten
NONE = float("-inf")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = drawn(3, 4, 37)
Y = drawn(3, 4, 37, seed=1)
I = torch.randint(-50, 50, (3, 4, 37), generator=torch.Generator().manual_seed(2))  # noqa: E741
J = torch.randint(-3, 4, (3, 1, 37), generator=torch.Generator().manual_seed(3))
B = X > 0
N = torch.tensor([[2, 0, 1], [2, 2, 0]])
SORTED = torch.arange(0, 80, 2).expand(3, 4, 40).contiguous()

EXACT = {
    "comparisons": (lambda x, y: [x > y, x >= 0.5, x < y, x <= y, x == y, x != 0, x.eq(y)], (X, Y)),
    "comparisons of whole numbers": (lambda i, j: [i > j, i >= 5, i < 0.5, i <= j, i == j, i != 3], (I, J)),
    "logic": (
        lambda b, x, i: [b & (x < 1), b | (i > 0), ~b, b ^ (i < 0), torch.logical_not(x), torch.logical_and(b, i), b.logical_or(x)],
        (B, X, I),
    ),
    "bits": (lambda i, j: [i & j, i | 7, i ^ j, ~i, (i + 100) >> 2, (i + 100) << 1], (I, J)),
    "whole numbers": (
        lambda i, j: [
            i + j, i - 2 * j, 3 - i, i * j, -i, i.abs(), i // 7, i % 7, i.remainder(-5), i.clamp(-3, 9),
            i.clamp(min=0), i.sign(),
        ],
        (I, J),
    ),
    "divided down": (
        lambda i, j: [
            torch.div(i, j.abs() + 1, rounding_mode="floor"), torch.div(i, -3, rounding_mode="floor"), i.div(4, rounding_mode="trunc"),
        ],
        (I, J),
    ),
    "smaller and larger": (
        lambda x, y, i, j: [
            torch.minimum(x, y), torch.maximum(x, y), torch.minimum(i, j), torch.maximum(i, j), x.clamp(-0.5, 0.5), x.relu(),
        ],
        (X, Y, I, J),
    ),
    "where": (
        lambda b, x, i: [
            torch.where(b, x, NONE), torch.where(b, i, -1), x.masked_fill(b, NONE), i.masked_fill(~b, 7),
            torch.where(b, x, x.new_zeros(())),
        ],
        (B, X, I),
    ),
    "dtypes": (
        lambda x, i, b: [
            (5 * x).long(), (5 * x).int(), i.float(), i.int(), b.float(), b.long(), x.bool(), i.bool(), x.half(),
            x.half().float(), i.half(), x.bfloat16().float(), (i + 60).to(torch.uint8), (i + 60).to(torch.uint8).float(),
        ],
        (X, I, B),
    ),
    "numbers of 16 bits": (lambda x, y: [x.half() + y.half(), x.half() * 3, x.half()[..., ::2] > 0], (X, Y)),
    "makers": (
        lambda x, i: [
            x.new_zeros(2, 3), torch.zeros_like(x), torch.ones_like(i), torch.full((2, 5), 7, dtype=torch.int32, device="cpu"),
            torch.arange(9, dtype=torch.int64, device="cpu"), torch.arange(2, 11, 3, dtype=torch.int64, device="cpu") + i[0, 0, :3],
            torch.arange(0, 2, 0.25, dtype=torch.float32, device="cpu"), x.new_full((3,), NONE), torch.zeros_like(x, dtype=torch.bool),
        ],
        (X, I),
    ),
    "sums of whole numbers": (
        lambda i, b: [
            i.sum(-1), b.sum(-1), b.sum((1, 2)), i.sum(1), i.sum(), b.any(-1), b.all(1), b.any(), i.cumsum(-1), b.cumsum(1),
            b.long().cumsum(0),
        ],
        (I, B),
    ),
    "largest and smallest": (lambda x, i: [x.amax(-1), x.amax((0, 2)), i.amin(1, keepdim=True), x.max(), i.amax(-1), x.amin(0)], (X, I)),
    "indices": (
        lambda x, i, n: [
            x.gather(1, n[:, :, None].expand(-1, -1, 37)), x.index_select(0, n[1]), x[n], i[:, n[0]], x[:, :, n - 3],
            x.gather(-1, (i.abs() % 37)),
            i.to(torch.int32).gather(2, i.abs() % 37), F.embedding(n, x[0]), x.bool().gather(0, n[:, :, None]),
        ],
        (X, I, N),
    ),
    "scatters": (
        lambda x, i, b, n: [
            x.scatter(2, (i.abs() % 37)[:, :, :1], 7.0), i.scatter(1, n[:, :, None], i), i.scatter_add(2, i.abs() % 37, i),
            x.scatter_reduce(2, i.abs() % 37, x, "amax"), b.scatter(2, (i.abs() % 37)[:, :, :1], b),
            i.scatter_reduce(0, n[:, :, None], i, "amin"),
        ],
        (X, I, B, N),
    ),
    "search": (lambda row, i: [torch.searchsorted(row, i), torch.searchsorted(row, i, right=True)], (SORTED, I)),
    "search for each": (lambda row, i: [torch.searchsorted(row.float(), i.float())], (SORTED, I)),
    "joined": (
        lambda x, i, b: [
            torch.cat([x, x[:, :2] * 2], 1), torch.stack([i, -i], 1), torch.cat([b, ~b], -1), F.pad(x, (1, 2, 0, 3), value=4.0),
            x.repeat(2, 1, 3), x.repeat_interleave(2, 1),
            i.repeat_interleave(3), torch.cat([i[0], i[1, :, :5], i[2]], -1),
        ],
        (X, I, B),
    ),
    "views": (
        lambda x, i: [
            x.transpose(0, 2)[3:9] + 0, i[:, 1:3].reshape(3, -1) + 0, x.unbind(1)[2] * 1, x.view(3, 2, 2, 37)[:, :, 0, ::2] * 1,
            i[..., None].expand(-1, -1, -1, 2).flatten(2) + 0, x.split([30, 7], -1)[1] + 0, x.permute(2, 0, 1).contiguous() + 0,
            x.movedim(0, 1)[:, 1].clone(),
        ],
        (X, I),
    ),
}  # fmt: skip


def returned(name: str):
    function, inputs = EXACT[name]
    return lambda *given: tuple(function(*given)), inputs


def run(function, inputs):
    """(what the graph's module returns, what one call of C++ does)."""
    module = make_fx(function)(*inputs)
    segment = whole(module)
    with torch.no_grad():
        expected, found = module(*inputs), segment(*inputs)
    assert segment.reason is None
    return expected, found


@pytest.mark.parametrize("name", EXACT)
def test_to_the_bit(name):
    for expected, found in zip(*run(*returned(name))):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", EXACT)
def test_to_the_bit_with_gaps(name):
    """Inputs with strides: every second number of a wider tensor, and dims the other way round."""
    function, inputs = returned(name)
    wide = [x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x) for x in inputs]
    if name != "search" and name != "search for each":
        wide[0] = inputs[0].transpose(0, -1).contiguous().transpose(0, -1)
    else:
        wide[0] = inputs[0]
    expected, found = run(function, wide)
    assert all(torch.equal(x, y) for x, y in zip(expected, found))


CLOSE = {
    "powers of e": lambda x: [torch.exp(4 * x), (40 * x).exp(), (x.abs() + 0.1).log(), torch.erf(x)],
    "sums": lambda x: [x.sum(1), x.mean((0, 2)), x.sum(), x.mean(-1, keepdim=True), x.cumsum(1)],
    "sums of exponentials": lambda x: [x.logsumexp(-1), (30 * x).logsumexp(1), x.logsumexp((0, 1), keepdim=True)],
    "softmax": lambda x: [x.softmax(-1), (9 * x).softmax(0)],
    "powers": lambda x: [x.abs() ** 1.7, 2.0**x, x**2, x**3, x.abs() ** -0.5, 1 / x],
    "products": lambda x: [
        x @ x.mT, x[0] @ x[1].T, torch.bmm(x, x.transpose(1, 2)), x.transpose(1, 2) @ x, torch.baddbmm(x[:, :, :4], x, x.mT),
        torch.addmm(x[0, 0, :4], x[1], x[2].T), x[..., :4] @ x, x @ x[0, 0],
        x[:, None, :, :5] @ x.view(3, 2, 2, 37)[None, :, :, 0, :20].reshape(1, 3, 2, 20)[:, :, 0].view(1, 3, 5, 4),
    ],
    "remainders": lambda x: [x % 0.3, x.remainder(-0.7), torch.div(x, 0.25, rounding_mode="floor"), x.floor(), x.ceil(), (9 * x).round()],
    "normalisation": lambda x: [F.rms_norm(x, (37,), x[0, 0], 1e-5), F.layer_norm(x, (37,), x[0, 0], x[0, 1]), x.abs().sqrt()],
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSE)
def test_close(name):
    expected, found = run(lambda x: tuple(CLOSE[name](x)), (X,))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=3e-6)


def test_a_file_is_read_where_it_is_mapped(tmp_path):
    segment, x = whole(make_fx(lambda x: (x * 2,))(X)), drawn(3, 4, 37, seed=5)
    (tmp_path / "numbers").write_bytes(x.numpy().tobytes())
    mapped = torch.from_file(str(tmp_path / "numbers"), shared=True, size=x.numel()).view(x.shape)
    with torch.no_grad():
        for given in (x, mapped, x):
            assert torch.equal(segment(given)[0], x * 2)
            assert segment.reason is None


def test_threads_of_python_run_the_same_tape():
    segment = whole(make_fx(lambda x: ((x * 2).softmax(-1) @ x.mT,))(X))
    given = [drawn(3, 4, 37, seed=seed) for seed in range(8)]

    def run_many(x: torch.Tensor) -> bool:
        with torch.no_grad():
            expected = segment(x)[0]
            return all(torch.equal(segment(x)[0], expected) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run_many, given))


def test_what_is_not_finite():
    x = torch.tensor([NONE, -NONE, math.nan, -1e30, 200.0, -200.0, 0.0])

    def function(x):
        return (
            x.exp(), x.clamp(-1, 1), torch.maximum(x, -x), x.amax(), x[:2].logsumexp(-1),
            x[:1].logsumexp(0), x[3:].logsumexp(0), x == x, x > NONE, x.cumsum(0), torch.where(x > 0, x, 0.0),
        )  # fmt: skip

    for expected, found in zip(*run(function, (x,))):
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_written_in_place():
    """Of inputs, of views of them and of what was made; each read sees the writes before it."""

    def function(x, i, b):
        x[:, 1:3].mul_(2.0)
        before = x.sum(-1)
        x[..., 0].copy_(i[..., 0])
        i.add_(1)
        b.logical_not_()
        x.masked_fill_(b & (i > 10), -1.0)
        made = torch.zeros_like(i).scatter_(2, i.abs() % 37, i)
        made[:, 0].fill_(9)
        x[..., 3:5].zero_()
        x[0].transpose(0, 1).add_(i[1].T)
        return before, made, x + made

    inputs = [X.clone(), I.clone(), B.clone()]
    module = make_fx(function)(*[x.clone() for x in inputs])
    segment, own = whole(module), [x.clone() for x in inputs]
    with torch.no_grad():
        for _ in range(3):
            for expected, found in zip(module(*inputs), segment(*own), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            assert all(torch.equal(x, y) for x, y in zip(inputs, own))
    assert segment.reason is None


def test_many_numbers_in_threads():
    """Instructions whose work is shared give the same bits."""

    def function(x, i):
        wide = torch.where(i > 0, x * 2, NONE)
        return (
            wide,
            wide.amax(-1),
            x.sum(-1),
            x.sum(0),
            x.cumsum(-1),
            i.cumsum(1),
            x.gather(1, i.abs()),
            torch.bmm(x[None], x.T[None]),
        )

    x = drawn(40, 3000)
    i = torch.randint(-2999, 3000, (40, 3000), generator=torch.Generator().manual_seed(0))
    segment, before = whole(make_fx(function)(x, i)), torch.get_num_threads()
    with torch.no_grad():
        torch.set_num_threads(1)
        alone = segment(x, i)
        torch.set_num_threads(3)
        together = segment(x, i)
    torch.set_num_threads(before)
    assert segment.reason is None
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    for one, other in zip(alone, function(x, i), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [-1, 37])
def test_an_index_outside_is_refused(wrong):
    index = torch.full((3, 4, 1), wrong)
    segment = whole(make_fx(lambda x, i: (x.gather(2, i),))(X, index * 0))
    with torch.no_grad(), pytest.raises(IndexError, match="an index lies outside"):
        segment(X, index)


UNSUPPORTED = {
    "sort": (lambda x: (x.sort(-1)[0] + 1,), "sort"),
    "float64": (lambda x: (x.double() * 2,), "torch.float64"),
    "several indices": (lambda x: (x[(x[0, :1, 0] * 0).long(), (x[0, :1, 0] * 0).long()],), "several indices"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_known_is_pytorchs_and_says_so(name):
    function, why = UNSUPPORTED[name]
    segment = whole(make_fx(function)(X))
    assert segment.reason == "it was never called"
    with torch.no_grad():
        assert torch.equal(segment(X)[0], function(X)[0])
        assert why in segment.reason
    segment(X.clone().requires_grad_())
    assert segment.reason == "gradients are recorded"
