"""Products, look-ups, scores and coarse attention on a memory's tensors, against loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.errors import InputError
from semkv.ir import state_ops
from semkv.kernels.state import REFERENCES
from semkv.runtime.quantization import dequantize, quantize

NONE = float("-inf")
SIZES = [(1, 1, 1, 1), (2, 3, 5, 63), (3, 2, 2, 111)]
FORMS = ["reference", "operator"]
"""The operator is what this machine has: a form in C++, or the reference."""


def form_of(name: str, form: str):
    return REFERENCES[name] if form == "reference" else getattr(state_ops, name)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def counts(rows: int, units: int) -> torch.Tensor:
    """All of them, none, and half."""
    return torch.tensor([units, 0, units // 2])[:rows]


def behind(x: torch.Tensor, count: torch.Tensor, along: int, garbage) -> torch.Tensor:
    """x [B, ...] with `garbage` behind each row's count along a dimension."""
    x = x.clone()
    for row, there in enumerate(count.tolist()):
        x[row].narrow(along - 1, there, x.shape[along] - there).fill_(garbage)
    return x


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [1, 15, 60])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, 8, 4])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes, kind, dim, form):
    rows, heads, queries, units = sizes
    q, x, count = drawn(rows, heads, queries, dim), drawn(rows, heads, units, dim, seed=1), counts(rows, units)
    if isinstance(kind, int):
        packed = quantize(x, kind)
        numbers = dequantize(packed).double()
        given = (q, behind(packed.codes, count, 2, 255), behind(packed.scale, count, 2, math.nan), kind)
    else:
        numbers = x.to(kind).double()
        given = (q, behind(x.to(kind), count, 2, math.nan))
    found = form_of("products", form)(*given)
    assert found.shape == (rows, heads, queries, units)
    assert found.dtype == torch.float32
    for row, there in enumerate(count.tolist()):
        for head in range(heads):
            for query in range(queries):
                for unit in range(0, there, 7):
                    expected = sum(a * b for a, b in zip(q[row, head, query].double(), numbers[row, head, unit]))
                    size = (q[row, head, query].double() * numbers[row, head, unit]).abs().sum()
                    assert abs(found[row, head, query, unit] - expected) <= 1e-5 * size + 1e-30


def test_codes_without_scales_are_refused():
    with pytest.raises(InputError, match="codes of 8 bits without scale"):
        REFERENCES["products"](drawn(1, 1, 1, 4), torch.zeros(1, 1, 3, 4, dtype=torch.uint8), None, 8)


# -- look-ups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stages", [1, 3, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_look_up(sizes, stages, form):
    rows, heads, queries, units = sizes
    tables = drawn(rows, heads, queries, stages, 256)
    codes = torch.randint(0, 256, (rows, heads, units, stages), generator=torch.Generator().manual_seed(1)).byte()
    found = form_of("look_up", form)(tables, codes)
    expected = torch.zeros(rows, heads, queries, units)
    for row in range(rows):
        for head in range(heads):
            for unit in range(units):
                for stage in range(stages):
                    expected[row, head, :, unit] += tables[row, head, :, stage, int(codes[row, head, unit, stage])]
    assert torch.equal(found, expected)


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("garbage", [math.nan, 1e38, NONE])
@pytest.mark.parametrize("sizes", [*SIZES, (2, 1, 1, 9000)], ids=str)
def test_scores(sizes, garbage, form):
    rows, heads, queries, units = sizes
    count = counts(rows, units)
    logits = 30 * drawn(*sizes) + 500
    logits[0, 0, 0, units // 2] = NONE if units > 1 else 500
    found, mass = form_of("scores", form)(behind(logits, count, 3, garbage), count)
    assert found.shape == sizes
    assert mass.shape == (rows, heads, queries, 1)
    for row, there in enumerate(count.tolist()):
        for head in range(heads):
            for query in range(queries):
                x = logits[row, head, query, :there].double().tolist()
                most = max(x, default=0.0)
                total = most + math.log(sum(math.exp(y - most) for y in x)) if x else NONE
                assert float(mass[row, head, query, 0]) == pytest.approx(total, rel=1e-6)
                assert (found[row, head, query, there:] == NONE).all()
                expected = torch.tensor([y - total for y in x], dtype=torch.float64)
                torch.testing.assert_close(found[row, head, query, :there].double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_what_nobody_wants_are_not_nan(form):
    logits = torch.full((2, 1, 1, 20), NONE)
    found, mass = form_of("scores", form)(logits, torch.tensor([20, 3]))
    assert (found == NONE).all()
    assert (mass == NONE).all()
    found, mass = form_of("scores", form)(torch.zeros(2, 1, 1, 0), torch.tensor([0, 0]))
    assert found.shape == (2, 1, 1, 0)
    assert (mass == NONE).all()


# -- coarse attention --------------------------------------------------------------------------------------------------


def coarse(rows, heads, queries, units, stages=3, dim=10, *, own=False, garbage=math.nan):
    generator = torch.Generator().manual_seed(units)
    count = counts(rows, units)
    chosen = torch.rand(rows, heads, units, generator=generator) < 0.3
    chosen[0, 0] = True  # nothing is left
    return {
        "score": behind(4 * drawn(rows, heads, queries, units), count, 3, garbage),
        "shift": drawn(rows, heads, queries, 1, seed=1),
        "chosen": chosen,
        "count": count,
        "codes": torch.randint(0, 256, (rows, heads, units, stages), generator=generator).byte(),
        "books": drawn(heads, stages, 256, dim, seed=2),
        "mean": drawn(heads, dim, seed=3),
        "own": torch.rand(rows, heads, queries, units, generator=generator) < 0.5 if own else None,
    }


def coarse_by_loops(score, shift, chosen, count, codes, books, mean, softcap=0.0, own=None):
    rows, heads, queries, _ = score.shape
    value = torch.zeros(rows, heads, queries, mean.shape[-1], dtype=torch.float64)
    mass = torch.full((rows, heads, queries), NONE, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            for query in range(queries):
                weights = []
                for unit in range(int(count[row])):
                    if chosen[row, head, unit] if own is None else own[row, head, query, unit]:
                        continue
                    logit = float(score[row, head, query, unit]) + float(shift[row, head, query])
                    logit = softcap * math.tanh(logit / softcap) if softcap else logit
                    stages = range(codes.shape[3])
                    x = mean[head].double() + sum(
                        books[head, s, int(codes[row, head, unit, s])].double() for s in stages
                    )
                    weights.append((math.exp(logit), x))
                total = sum(weight for weight, _ in weights)
                if weights:
                    value[row, head, query] = sum(weight / total * x for weight, x in weights)
                    mass[row, head, query] = math.log(total)
    return value, mass


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, 1e38])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 4, 37), (3, 2, 1, 63)], ids=str)
def test_coarse_attention(sizes, garbage, own, softcap, form):
    given = coarse(*sizes, own=own, garbage=garbage)
    value, mass = form_of("coarse_attention", form)(**given, softcap=softcap)
    expected, total = coarse_by_loops(**given, softcap=softcap)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mass.double(), total, rtol=1e-5, atol=1e-5)


# -- all of them -------------------------------------------------------------------------------------------------------


def arguments(name: str, seed: int = 0) -> dict:
    if name == "products":
        packed = quantize(drawn(2, 2, 9, 7, seed=seed), 4)
        return {"q": drawn(2, 2, 3, 7), "x": packed.codes, "scale": packed.scale, "bits": 4}
    if name == "look_up":
        codes = torch.randint(0, 256, (2, 2, 9, 3), generator=torch.Generator().manual_seed(seed)).byte()
        return {"tables": drawn(2, 2, 3, 3, 256), "codes": codes}
    if name == "scores":
        return {"logits": drawn(2, 2, 3, 9, seed=seed), "count": torch.tensor([5 + seed, 0])}
    given = coarse(2, 2, 3, 9, own=True, garbage=1e38)
    return given | {"score": drawn(2, 2, 3, 9, seed=seed), "count": torch.tensor([5 + seed, 0])}


NAMES = ["products", "look_up", "scores", "coarse_attention"]


@pytest.mark.parametrize("name", NAMES)
def test_the_operators_are_as_their_schemas_say(name):
    operator = getattr(state_ops, name)
    torch.library.opcheck(operator, (), arguments(name), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
def test_the_references_are_traced_without_numbers(name):
    given = arguments(name)
    numbers = {key: x for key, x in given.items() if not torch.is_tensor(x)}
    with FakeTensorMode() as mode:
        REFERENCES[name](**{key: mode.from_tensor(x) if torch.is_tensor(x) else x for key, x in given.items()})
    tensors = {key: x for key, x in given.items() if torch.is_tensor(x)}
    graph = make_fx(lambda asked: REFERENCES[name](**asked, **numbers), tracing_mode="fake")(tensors)
    for seed in (0, 1):
        given = arguments(name, seed)
        found = graph({key: x for key, x in given.items() if torch.is_tensor(x)})
        expected = REFERENCES[name](**given)
        for one, other in zip(*((x,) if torch.is_tensor(x) else x for x in (found, expected))):
            assert torch.equal(one, other)
