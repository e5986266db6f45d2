"""Products, look-ups, scores and coarse attention on a memory's tensors, against loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.errors import InputError
from semkv.ir import state_ops
from semkv.kernels.calls import OPERATORS, UnsupportedCall, run
from semkv.kernels.cpp import compiler
from semkv.kernels.state import IN_CPP, REFERENCES
from semkv.runtime.store.quantization import dequantize, quantize

pytestmark = pytest.mark.usefixtures("filled_with_nan")

NONE = float("-inf")
SIZES = [(1, 1, 1, 1), (2, 3, 5, 63), (3, 2, 2, 111)]
NEEDS_CPP = pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")
FORMS = ["reference", pytest.param("cpp", marks=NEEDS_CPP)]
NAMES = ["products", "look_up", "scores", "coarse_attention"]


def answered(name: str, form, **arguments):
    """What a form returns; that in C++ is one, not the reference in its place. form: its name, or what answers a call of any operator."""
    if callable(form):
        return form(name, **arguments)
    if form == "reference":
        return REFERENCES[name](**arguments)
    outputs = run(IN_CPP[name].describe(**arguments), arguments)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def apart(x: torch.Tensor, dim: int, garbage=math.nan) -> torch.Tensor:
    """x as a part of a larger tensor, with `garbage` around it along a dimension."""
    whole = torch.full((*x.shape[:dim], x.shape[dim] + 3, *x.shape[dim + 1 :]), garbage, dtype=x.dtype)
    part = whole.narrow(dim, 1, x.shape[dim])
    return part.copy_(x)


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
        given = {
            "q": q,
            "x": behind(packed.codes, count, 2, 255),
            "scale": behind(packed.scale, count, 2, math.nan),
            "bits": kind,
        }
    else:
        numbers = x.to(kind).double()
        given = {"q": q, "x": behind(x.to(kind), count, 2, math.nan)}
    found = answered("products", form, **given)
    assert found.shape == (rows, heads, queries, units)
    assert found.dtype == torch.float32
    for row, there in enumerate(count.tolist()):
        for head in range(heads):
            for query in range(queries):
                for unit in range(0, there, 7):
                    expected = sum(a * b for a, b in zip(q[row, head, query].double(), numbers[row, head, unit]))
                    size = (q[row, head, query].double() * numbers[row, head, unit]).abs().sum()
                    assert abs(found[row, head, query, unit] - expected) <= 1e-5 * size + 1e-30


@NEEDS_CPP
@pytest.mark.parametrize("dim", [64, 128, 160])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, 8, 4])
def test_products_of_many_vectors_where_they_lie(kind, dim):
    """More than a task has, of queries as projections leave them and vectors of a longer memory, with gaps everywhere."""
    units = 4100
    q, x = drawn(2, 5, 3, dim).transpose(1, 2), apart(drawn(2, 3, units, dim, seed=1), 2)
    given = {"q": q, "x": x if isinstance(kind, int) else x.to(kind)}
    if isinstance(kind, int):
        packed = quantize(drawn(2, 3, units, dim, seed=1), kind)
        given = {
            "q": q,
            "x": apart(apart(packed.codes, 2, 255), 3, 255),
            "scale": apart(apart(packed.scale, 3), 2),
            "bits": kind,
        }
    else:
        given["x"] = apart(apart(given["x"], 3), 1)
    found, expected = answered("products", "cpp", **given), REFERENCES["products"](**given)
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_in_float32(bits, form):
    packed = quantize(drawn(2, 3, 70, 33, seed=1), bits)
    given = {"q": drawn(2, 3, 2, 33), "x": packed.codes, "bits": bits}
    wide = answered("products", form, **given, scale=packed.scale.float())
    torch.testing.assert_close(wide, answered("products", form, **given, scale=packed.scale))


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
    found = answered("look_up", form, tables=tables, codes=codes)
    expected = torch.zeros(rows, heads, queries, units)
    for row in range(rows):
        for head in range(heads):
            for unit in range(units):
                for stage in range(stages):
                    expected[row, head, :, unit] += tables[row, head, :, stage, int(codes[row, head, unit, stage])]
    assert torch.equal(found, expected)


@NEEDS_CPP
@pytest.mark.parametrize(("queries", "stages"), [(7, 4), (17, 2)])
def test_look_up_in_tables_where_they_lie(queries, stages):
    """More units than a task has, and tables and codes with gaps."""
    tables = apart(drawn(2, queries, 3, stages, 256).transpose(1, 2), 2)
    codes = torch.randint(0, 256, (2, 3, 5000, stages), generator=torch.Generator().manual_seed(1)).byte()
    given = {"tables": tables, "codes": apart(codes, 2, 255)}
    assert torch.equal(answered("look_up", "cpp", **given), REFERENCES["look_up"](**given))


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("garbage", [math.nan, 1e38, NONE])
@pytest.mark.parametrize("sizes", [*SIZES, (2, 1, 1, 9000)], ids=str)
def test_scores(sizes, garbage, form):
    rows, heads, queries, units = sizes
    count = counts(rows, units)
    logits = 30 * drawn(*sizes) + 500
    logits[0, 0, 0, units // 2] = NONE if units > 1 else 500
    found, mass = answered("scores", form, logits=behind(logits, count, 3, garbage), count=count)
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
    found, mass = answered("scores", form, logits=logits, count=torch.tensor([20, 3]))
    assert (found == NONE).all()
    assert (mass == NONE).all()
    found, mass = answered("scores", form, logits=torch.zeros(2, 1, 1, 0), count=torch.tensor([0, 0]))
    assert found.shape == (2, 1, 1, 0)
    assert (mass == NONE).all()


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_logits_where_they_lie(form):
    logits, count = drawn(2, 5, 3, 70).transpose(1, 2), torch.tensor([70, 33])
    found, mass = answered("scores", form, logits=apart(logits, 3), count=count)
    for row, there in enumerate(count.tolist()):
        torch.testing.assert_close(found[row, ..., :there], logits[row, ..., :there].log_softmax(-1))
        torch.testing.assert_close(mass[row, ..., 0], logits[row, ..., :there].logsumexp(-1))


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_as_exact_far_from_zero(form):
    """What is taken off first is the largest, so that the logarithm of the sum keeps its digits."""
    logits = 1e4 + drawn(1, 1, 1, 1000)
    found, _ = answered("scores", form, logits=logits, count=torch.tensor([1000]))
    torch.testing.assert_close(found.double(), logits.double().log_softmax(-1), rtol=0, atol=2e-6)


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
    value, mass = answered("coarse_attention", form, **given, softcap=softcap)
    expected, total = coarse_by_loops(**given, softcap=softcap)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mass.double(), total, rtol=1e-5, atol=1e-5)


@NEEDS_CPP
@pytest.mark.parametrize(("queries", "dim"), [(3, 64), (8, 20), (11, 96), (1, 133)])
@pytest.mark.parametrize("own", [False, True])
def test_coarse_attention_of_many_units_where_they_lie(own, queries, dim):
    """Several parts of units, rows of queries and numbers of a value, and every tensor with gaps."""
    given = coarse(2, 2, queries, 9001, stages=2, dim=dim, own=own) | {
        "count": torch.tensor([8999, 4097]),
        "softcap": 3.0,
    }
    given["score"] = 4 * drawn(2, queries, 2, 9001).transpose(1, 2)
    expected = REFERENCES["coarse_attention"](**given)
    for name, garbage in (("score", math.nan), ("chosen", True), ("codes", 255)):
        given[name] = apart(apart(given[name], 2, garbage), 1, garbage)
    if own:
        given["own"] = apart(given["own"], 3, True)
    found = answered("coarse_attention", "cpp", **given)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_what_nobody_scores_has_no_share(form):
    """A score of -inf is no weight, and vectors that no unit has are never read."""
    given = coarse(1, 1, 2, 5, garbage=0.0) | {"chosen": torch.zeros(1, 1, 5, dtype=torch.bool)}
    given["score"][0, 0, 0, 1:] = NONE
    given["score"][0, 0, 1] = NONE
    value, mass = answered("coarse_attention", form, **given)
    codes = given["codes"][0, 0, 0].tolist()
    expected = given["mean"][0] + sum(given["books"][0, stage, code] for stage, code in enumerate(codes))
    torch.testing.assert_close(value[0, 0, 0], expected)
    assert (value[0, 0, 1] == 0).all()
    assert mass[0, 0, 1] == NONE


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


@NEEDS_CPP
@pytest.mark.parametrize("name", NAMES)
def test_threads_change_no_bit(name):
    many = {
        "products": lambda: arguments(name) | {"q": drawn(2, 2, 3, 7), "x": large.codes, "scale": large.scale},
        "look_up": lambda: {"tables": drawn(2, 2, 9, 3, 256), "codes": codes},
        "scores": lambda: {"logits": drawn(2, 2, 3, 20000), "count": torch.tensor([20000, 11111])},
        "coarse_attention": lambda: coarse(2, 2, 9, 9000, dim=100),
    }
    large = quantize(drawn(2, 2, 9000, 7), 4)
    codes = torch.randint(0, 256, (2, 2, 9000, 3), generator=torch.Generator().manual_seed(1)).byte()
    given, found, before = many[name](), [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        made = answered(name, "cpp", **given)
        found.append((made,) if torch.is_tensor(made) else made)
    torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other))


@NEEDS_CPP
@pytest.mark.parametrize("name", NAMES)
def test_the_operators_are_their_calls(name):
    """What PyTorch's dispatcher calls is the form in C++, which a list of calls has by the operator."""
    given, operator = arguments(name), getattr(state_ops, name)
    assert OPERATORS[operator] is IN_CPP[name]
    found, expected = operator(**given), answered(name, "cpp", **given)
    for one, other in zip(*((x,) if torch.is_tensor(x) else x for x in (found, expected))):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_described_without_numbers(name):
    given = arguments(name)
    meta = {
        key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if torch.is_tensor(x) else x
        for key, x in given.items()
    }
    one, other = IN_CPP[name].describe(**given), IN_CPP[name].describe(**meta)
    assert (one.words, one.addresses, one.arguments) == (other.words, other.addresses, other.arguments)
    assert not one.written


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("products", "q", lambda x: x.double()),
        ("products", "q", lambda x: x.repeat_interleave(2, 3)[..., ::2]),
        ("products", "x", lambda x: x[..., 1:]),
        ("products", "x", lambda x: x.char()),
        ("products", "scale", lambda x: x.double()),
        ("products", "scale", lambda x: x[:, :1]),
        ("products", "bits", lambda x: 2),
        ("look_up", "tables", lambda x: x[..., :255]),
        ("look_up", "tables", lambda x: x.half()),
        ("look_up", "codes", lambda x: x[:, :, ::2]),
        ("look_up", "codes", lambda x: x.int()),
        ("scores", "logits", lambda x: x.mT.contiguous().mT),
        ("scores", "logits", lambda x: x.double()),
        ("scores", "count", lambda x: x.int()),
        ("coarse_attention", "score", lambda x: x.bfloat16()),
        ("coarse_attention", "shift", lambda x: x[..., 0]),
        ("coarse_attention", "own", lambda x: x[:, :, :1]),
        ("coarse_attention", "chosen", lambda x: x.byte()),
        ("coarse_attention", "books", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        ("coarse_attention", "books", lambda x: x[:, :, :200]),
    ],
)
def test_what_there_is_no_function_for_is_said(name, key, change):
    given = arguments(name)
    with pytest.raises(UnsupportedCall, match="expected"):
        IN_CPP[name].describe(**given | {key: change(given[key])})


@pytest.mark.parametrize("name", ["products", "scores"])
def test_what_cpp_cannot_is_done_by_the_reference(name):
    key = {"products": "q", "scores": "logits"}[name]
    given = arguments(name)
    given[key] = given[key].mT.contiguous().mT
    assert IN_CPP[name].call(given) is None
    found, expected = getattr(state_ops, name)(**given), REFERENCES[name](**given)
    assert all(map(torch.equal, found, expected))
