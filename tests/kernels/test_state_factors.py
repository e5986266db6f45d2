"""Attention to spans that wait as low-rank factors, against loops in float64 that rebuild every token."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.ir import state_ops
from semkv.kernels.calls import OPERATORS, UnsupportedCall, run
from semkv.kernels.cpp import compiler
from semkv.kernels.state import IN_CPP, REFERENCES

pytestmark = pytest.mark.usefixtures("filled_with_nan")

NAME = "factored_attention_"
NEEDS_CPP = pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")
FORMS = ["reference", pytest.param("cpp", marks=NEEDS_CPP)]
LONGEST, RANK, ASKED = 9, 7, 60


def given(rows, heads, queries, units, spans, dim=10, value_dim=6, *, dtype=torch.float32, own=False, seed=0, **more):
    """Spans of drawn lengths and ranks in drawn order, some of which nobody has; between the factors lies what is no number."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    length, ranks = whole(1, LONGEST + 1, rows, spans), whole(1, RANK + 1, rows, heads, spans, 2)
    sizes = ranks[..., 0] * (length[:, None] + 1 + dim) + ranks[..., 1] * (length[:, None] + 1 + value_dim)
    order = torch.randperm(heads * spans, generator=generator)
    first = torch.empty_like(sizes).flatten(1)
    first[:, order] = (sizes.flatten(1)[:, order] + 3).cumsum(1) - sizes.flatten(1)[:, order]
    data = torch.full((rows, int((first + sizes.flatten(1)).max()) + 5), math.nan)
    for row in range(rows):
        for start, size in zip(first[row].tolist(), sizes[row].flatten().tolist()):
            data[row, start : start + size] = torch.randn(size, generator=generator)
    chosen = torch.rand(rows, heads, units, generator=generator) < 0.5
    reads = (torch.rand(rows, heads, queries, units, generator=generator) < 0.6) & chosen[:, :, None]
    return {
        "q": torch.randn(rows, heads, queries, dim, generator=generator),
        "chosen": chosen,
        "held": torch.rand(rows, heads, spans, generator=generator) < 0.5,
        "data": data.to(dtype),
        "where": torch.cat([first.view_as(sizes)[..., None], ranks], -1),
        "spans": torch.stack([length, whole(0, ASKED + 3, rows, spans)], -1),
        "unit": whole(-1, units, rows, heads, spans),
        "asked": torch.full((rows,), ASKED),
        "value_dim": value_dim,
        "longest": LONGEST,
        "rank": RANK,
        "scale": 0.3,
        "own": reads if own else None,
        **more,
    }


def answered(form: str, arguments: dict):
    """What a form returns, and what it puts down as held."""
    arguments = {name: x.clone() if torch.is_tensor(x) else x for name, x in arguments.items()}
    made = REFERENCES[NAME](**arguments) if form == "reference" else run(IN_CPP[NAME].describe(**arguments), arguments)
    return (*made, arguments["held"])


def by_loops(
    q, chosen, held, data, where, spans, unit, asked, value_dim, longest, rank, scale, softcap=0.0, window=0, own=None
):
    rows, heads, queries, dim = q.shape
    value = torch.zeros(rows, heads, queries, value_dim, dtype=torch.float64)
    mass, told = torch.full((rows, heads, queries), -math.inf, dtype=torch.float64), torch.zeros(rows, 2).long()
    read = torch.zeros_like(held)
    for row in range(rows):
        for head in range(heads):
            found: list[tuple[int, torch.Tensor, torch.Tensor, int]] = []
            for span in range(where.shape[2]):
                mine = int(unit[row, head if unit.shape[1] > 1 else 0, span])
                if mine < 0 or not chosen[row, head, mine]:
                    continue
                read[row, head, span] = True
                (first, *ranks), (length, position) = where[row, head, span].tolist(), spans[row, span].tolist()
                sides, start = [], first
                for r, size in zip(ranks, (dim, value_dim)):
                    cut = data[row, start : start + r * (length + 1 + size)].double()
                    u, s, v = cut.split([length * r, r, size * r])
                    sides.append((u.view(length, r) * s) @ v.view(size, r).mT)
                    start += len(cut)
                told[row, int(held[row, head, span])] += (start - first) * data.itemsize
                found += [(mine, k, v, position + n) for n, (k, v) in enumerate(zip(*sides))]
            for query in range(queries):
                logits, values = [], []
                for mine, k, v, position in found:
                    away = int(asked[row]) - position
                    if away < 0 or (window and away >= window) or (own is not None and not own[row, head, query, mine]):
                        continue
                    x = scale * q[row, head, query].double() @ k
                    logits.append(softcap * torch.tanh(x / softcap) if softcap else x)
                    values.append(v)
                if logits:
                    x = torch.stack(logits)
                    mass[row, head, query] = x.logsumexp(0)
                    value[row, head, query] = x.softmax(0) @ torch.stack(values)
    return value, mass, told, read


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"window": 30}], ids=str)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 3, 4, 11, 17), (3, 2, 1, 30, 16), (1, 2, 9, 5, 40)], ids=str)
def test_attention_to_factors(sizes, own, more, form):
    arguments = given(*sizes, own=own, **more)
    found, expected = answered(form, arguments), by_loops(**arguments)
    for one, other in zip(found[:2], expected):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[3], expected[3])
    assert sizes[0] == 1 or int(expected[2].min()) > 0, "some were there, and some were not"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (7, 133)])
def test_factors_of_fewer_bits(dim, value_dim, dtype, form):
    """Units that all heads share."""
    arguments = given(2, 2, 3, 9, 20, dim, value_dim, dtype=dtype)
    arguments["unit"] = arguments["unit"][:, :1]
    found, expected = answered(form, arguments), by_loops(**arguments)
    for one, other in zip(found[:2], expected):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("form", FORMS)
def test_nothing_chosen_is_nothing(form):
    arguments = given(1, 2, 3, 4, 5)
    arguments["chosen"].zero_()
    value, mass, told, held = answered(form, arguments)
    assert not value.any()
    assert (mass == -math.inf).all()
    assert not told.any()
    assert not held.any()


@pytest.mark.parametrize("form", FORMS)
def test_logits_beyond_what_exponentials_hold(form):
    arguments = given(1, 2, 3, 4, 9, scale=40.0)
    found, expected = answered(form, arguments), by_loops(**arguments)
    assert expected[1].max() > 200
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)


@NEEDS_CPP
def test_tensors_with_gaps_and_threads():
    """Rows of a larger tensor; the same bits with every number of threads."""
    arguments = given(2, 3, 4, 11, 17, own=True)
    plain, before = answered("cpp", arguments), torch.get_num_threads()
    for name in ("q", "chosen", "held", "own"):
        x = arguments[name]
        whole = torch.ones((x.shape[0], x.shape[1] + 2, *x.shape[2:]), dtype=x.dtype)
        arguments[name] = whole[:, 1:-1].copy_(x)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            held = arguments["held"].clone()
            found = (*run(IN_CPP[NAME].describe(**arguments), arguments), arguments["held"].clone())
            arguments["held"].copy_(held)
            assert all(torch.equal(one, other) for one, other in zip(found, plain))
    finally:
        torch.set_num_threads(before)


def test_it_is_as_its_schema_says():
    torch.library.opcheck(
        getattr(state_ops, NAME), (), given(2, 2, 3, 9, 8, own=True), test_utils=("test_schema", "test_faketensor")
    )


def test_the_reference_is_traced_without_numbers():
    arguments = given(2, 2, 3, 9, 8, own=True)
    numbers = {key: x for key, x in arguments.items() if not torch.is_tensor(x)}
    with FakeTensorMode() as mode:
        REFERENCES[NAME](**{key: mode.from_tensor(x) if torch.is_tensor(x) else x for key, x in arguments.items()})
    tensors = {key: x for key, x in arguments.items() if torch.is_tensor(x)}
    graph = make_fx(lambda asked: REFERENCES[NAME](**asked, **numbers), tracing_mode="fake")(
        {key: x.clone() for key, x in tensors.items()}
    )
    expected = answered("reference", arguments)
    found = graph({key: x.clone() for key, x in tensors.items()})
    assert all(torch.equal(one, two) for one, two in zip(found, expected))


@NEEDS_CPP
def test_the_operator_is_its_call():
    """What PyTorch's dispatcher calls is the form in C++, which a list of calls has by the operator; what it writes it says."""
    arguments, operator = given(2, 2, 3, 9, 8, own=True), getattr(state_ops, NAME)
    assert OPERATORS[operator] is IN_CPP[NAME]
    expected = answered("cpp", arguments)
    found = (*operator(**arguments), arguments["held"])
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert IN_CPP[NAME].describe(**arguments).written == ("held",)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("q", lambda x: x.double()),
        ("chosen", lambda x: x.byte()),
        ("held", lambda x: x[:, :1]),
        ("data", lambda x: x.double()),
        ("where", lambda x: x.int()),
        ("where", lambda x: x[:, :, ::2]),
        ("spans", lambda x: x.repeat_interleave(2, 2)[..., ::2]),
        ("spans", lambda x: x.repeat_interleave(2, 1)[:, ::2]),
        ("unit", lambda x: x[..., :3]),
        ("asked", lambda x: x.int()),
        ("own", lambda x: x[:, :, :1]),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(key, change):
    arguments = given(2, 2, 3, 9, 8, own=True)
    arguments[key] = change(arguments[key])
    with pytest.raises(UnsupportedCall):
        IN_CPP[NAME].describe(**arguments)
