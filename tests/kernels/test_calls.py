"""Calls described from layouts alone: attention, projections and products equal their entry points; what they refuse."""

from __future__ import annotations

import ctypes
import math
import platform
from typing import Any

import pytest
import torch

from semkv.errors import InputError
from semkv.ir import ops
from semkv.ir.memory import Entries
from semkv.kernels import calls, cpp
from semkv.kernels.calls import OPERATORS, Call, Operand, Operator, UnsupportedCall, call, demand, flat, run
from semkv.kernels.cpp import compiler
from semkv.kernels.linear.cpp import FEW_TOKENS, describe_linear, linear_cpp
from semkv.kernels.mixed_attention.cpp import (
    MAX_ROWS,
    SPLIT_ENTRIES,
    describe_attention,
    mixed_attention_cpp,
)
from semkv.kernels.state import bmm as bmm_module
from semkv.kernels.state.bmm import bmm, bmm_library, describe_bmm
from semkv.runtime.store.quantization import quantize

pytestmark = pytest.mark.usefixtures("filled_with_nan")

NEEDS_CPP = pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++")
SCALE = 0.3
TERMS = {
    "plain": {},
    "all": {"sinks": (), "bias_slopes": (), "bias_table": (13,), "softcap": 2.0},
    "window": {"sinks": (), "window": 20},
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bare(x: Any) -> Any:
    """Tensors without numbers."""
    if isinstance(x, list):
        return [bare(part) for part in x]
    if not torch.is_tensor(x):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def same(one: Call, other: Call) -> bool:
    parts = ("function", "words", "addresses", "threads", "parallel", "arguments", "outputs", "scratch", "written")
    return all(getattr(one, name) == getattr(other, name) for name in parts)


def made(describe: Any, given: dict[str, Any]) -> torch.Tensor:
    """The one tensor that a call returns which was described without numbers."""
    described = describe(**{name: bare(x) for name, x in given.items()})
    assert same(described, describe(**given))
    (out,) = run(described, flat(given))
    return out


def terms(name: str, q_heads: int) -> dict[str, Any]:
    own = {key: drawn(q_heads, *x, seed=9).abs() if isinstance(x, tuple) else x for key, x in TERMS[name].items()}
    return {"scale": SCALE, **own}


def apart(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as a part of a larger tensor, with NaN or the largest codes around it along a dimension."""
    fill = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    whole = torch.full((*x.shape[:dim], x.shape[dim] + 3, *x.shape[dim + 1 :]), fill, dtype=x.dtype)
    return whole.narrow(dim, 1, x.shape[dim]).copy_(x)


def changed(given: dict[str, Any], change: Any) -> dict[str, Any]:
    """Every tensor of the blocks changed."""
    made = dict(given)
    for name, x in given.items():
        if name.startswith("block_") and isinstance(x, list):
            made[name] = [change(part) if torch.is_tensor(part) else part for part in x]
    return made


# -- attention ---------------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "one row": {"batch": 1, "tokens": 1, "q_heads": 6, "kv_heads": 2, "dim": 15, "value_dim": 9, "exact": 63},
    "rows": {"batch": 3, "tokens": 1, "q_heads": 4, "kv_heads": 2, "dim": 16, "exact": 33, "coarse": 75, "bits": (8, 8)},
    "short codes": {"batch": 2, "tokens": 2, "q_heads": 4, "kv_heads": 1, "dim": 32, "exact": 5, "coarse": 31, "bits": (4, 4)},
    "biased": {"batch": 2, "tokens": 3, "q_heads": 2, "kv_heads": 2, "dim": 8, "exact": 17, "coarse": 9, "biased": True},
    "splits": {"batch": 2, "tokens": 1, "q_heads": 4, "kv_heads": 2, "dim": 16, "exact": 2 * SPLIT_ENTRIES + 37},
    "one place for all heads": {"batch": 2, "tokens": 1, "q_heads": 4, "kv_heads": 2, "dim": 16, "exact": 20, "heads_of_positions": 1},
}  # fmt: skip


def asked(entries: Any, shape: str, term: str = "plain") -> dict[str, Any]:
    """The operator's arguments by name, all of those that are tensors."""
    q, where, own = entries(**SHAPES[shape], dtype=torch.float32)
    return {"q": q, "q_positions": where, **own._asdict(), **terms(term, q.shape[1])}


def positional(given: dict[str, Any]) -> torch.Tensor:
    """What the entry point makes of it."""
    given = dict(given)
    own = Entries(**{name: given.pop(name) for name in Entries._fields})
    return mixed_attention_cpp(given.pop("q"), given.pop("q_positions"), *own, **given)


@NEEDS_CPP
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_its_entry_point(entries, shape, term):
    given = asked(entries, shape, term)
    assert torch.equal(made(describe_attention, given), positional(given))


@NEEDS_CPP
@pytest.mark.parametrize("shape", ["rows", "biased", "one place for all heads"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_blocks_of_rows_are_read_where_they_lie(entries, shape, dim):
    """Parts of larger tensors: of a batch with gaps the entry point copies rows, a described call does not."""
    given = asked(entries, shape)
    expected = positional(given)
    assert torch.equal(made(describe_attention, changed(given, lambda x: apart(x, dim))), expected)


@NEEDS_CPP
def test_vectors_with_gaps_and_queries_as_projections_leave_them(entries):
    given = asked(entries, "rows")
    expected = positional(given)
    given["q"] = given["q"].transpose(1, 2).contiguous().transpose(1, 2)
    given["q_positions"] = apart(given["q_positions"], 0)
    widened = changed(given, lambda x: apart(x, 3) if x.dim() == 4 and x.shape[3] > 1 else x)
    assert torch.equal(made(describe_attention, widened), expected)


@NEEDS_CPP
def test_positions_of_eight_bytes_and_of_four(entries):
    given = asked(entries, "rows")
    expected = positional(given)
    for dtype in (torch.int32, torch.int64):
        own = given | {"block_positions": [x.to(dtype) for x in given["block_positions"]]}
        assert torch.equal(made(describe_attention, own), expected)


@NEEDS_CPP
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_of_two_bytes(entries, dtype):
    given = asked(entries, "biased")
    for name in ("block_k", "block_v"):
        given[name] = [x.to(dtype) for x in given[name]]
    assert torch.equal(made(describe_attention, given), positional(given))


@NEEDS_CPP
def test_blocks_of_some_heads(entries):
    """Every place has blocks of its own: `block_heads` says from which place on."""
    q, where, own = entries(**SHAPES["rows"] | {"coarse": 0, "batch": 2}, dtype=torch.float32)
    k, v, positions = own.block_k[0], own.block_v[0], own.block_positions[0]
    expected = mixed_attention_cpp(q, where, [k], [v], [positions], scale=SCALE)
    parts = [(0, slice(0, 1), slice(0, 2)), (2, slice(1, 2), slice(0, 1)), (3, slice(1, 2), slice(1, 2))]
    given = {
        "q": q,
        "q_positions": where,
        "block_k": [k[row, head] for _, row, head in parts],
        "block_v": [v[row, head] for _, row, head in parts],
        "block_positions": [positions[row, head] for _, row, head in parts],
        "block_heads": [first for first, *_ in parts],
        "scale": SCALE,
    }
    assert torch.equal(made(describe_attention, given), expected)


@NEEDS_CPP
def test_attention_with_empty_blocks(entries):
    given = asked(entries, "one row")
    expected = positional(given)
    for name, width in (("block_k", 15), ("block_v", 9)):
        given[name] = [torch.empty(1, 2, 0, width, dtype=torch.float32), *given[name]]
    given["block_positions"] = [torch.empty(1, 2, 0, dtype=torch.int64), *given["block_positions"]]
    assert torch.equal(made(describe_attention, given), expected)


REFUSED = {
    "queries of two bytes": lambda x: x | {"q": x["q"].half()},
    "queries with gaps": lambda x: x | {"q": x["q"].mT.contiguous().mT},
    "positions of queries in four bytes": lambda x: x | {"q_positions": x["q_positions"].int()},
    "keys with gaps": lambda x: x | {"block_k": [y.mT.contiguous().mT for y in x["block_k"]]},
    "keys in float64": lambda x: x | {"block_k": [y.double() for y in x["block_k"]]},
    "values of integers": lambda x: x | {"block_v": [y.int() for y in x["block_v"]]},
    "positions of two bytes": lambda x: x | {"block_positions": [y.short() for y in x["block_positions"]]},
    "a bias in float16": lambda x: x | {"block_bias": [y.half() for y in x["block_bias"]]},
    "fewer values": lambda x: x | {"block_v": [y[:, :, 1:] for y in x["block_v"]]},
    "sinks in float64": lambda x: x | {"sinks": drawn(2).double()},
    "one slope for all": lambda x: x | {"bias_slopes": drawn(1).expand(2)},
    "a prompt": lambda x: x | {"fresh": True},
    "another kernel": lambda x: x | {"kernel": "torch"},
    "factored spans": lambda x: x | {"key_u": drawn(2, 2, 1, 5, 3)},
    "many rows": lambda x: x | {"q": drawn(2, MAX_ROWS, 3, 8), "block_bias": None},
    "wide vectors": lambda x: x | {"q": drawn(2, 2, 3, 300), "block_k": [drawn(*y.shape[:3], 300) for y in x["block_k"]]},
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_attention_that_there_is_no_function_for(entries, change):
    given = asked(entries, "biased")
    with pytest.raises(UnsupportedCall):
        describe_attention(**REFUSED[change](given))


def test_scales_other_than_float16_are_refused(entries):
    given = asked(entries, "rows")
    given["block_k_scale"] = [None, given["block_k_scale"][1].float()]
    with pytest.raises(UnsupportedCall, match=r"a scale .* expected torch\.float16"):
        describe_attention(**given)


@NEEDS_CPP
def test_the_list_of_operators_has_attention(entries):
    given = asked(entries, "rows")
    described = OPERATORS[ops.mixed_attention].call(given)
    assert described is not None
    assert same(described, describe_attention(**given))
    assert OPERATORS[ops.mixed_attention].call(given) is described


@NEEDS_CPP
def test_threads_change_no_bit_of_attention(entries):
    given, before, found = asked(entries, "splits"), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(made(describe_attention, given))
    torch.set_num_threads(before)
    assert torch.equal(*found)


# -- projections -------------------------------------------------------------------------------------------------------


@NEEDS_CPP
@pytest.mark.parametrize("tokens", [(1, 1), (3,), (2, 1, 2), (FEW_TOKENS,)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (13, 7), (257, 259)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_projections_are_those_of_their_entry_point(tokens, sizes, bias):
    given = {
        "x": drawn(*tokens, sizes[1]),
        "weight": drawn(*sizes, seed=1),
        "bias": drawn(sizes[0], seed=2) if bias else None,
    }
    assert torch.equal(made(describe_linear, given), linear_cpp(**given))
    assert torch.equal(OPERATORS[ops.linear](**given), ops.linear(**given)) or sizes[0] * sizes[1] < 1 << 14


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("x", drawn(FEW_TOKENS + 1, 7)),
        ("x", drawn(0, 7)),
        ("x", drawn(2, 14)[:, ::2]),
        ("x", drawn(2, 7).double()),
        ("weight", drawn(13, 8)[:, :7]),
        ("weight", drawn(13, 7).half()),
        ("weight", drawn(7)),
        ("bias", drawn(12)),
        ("bias", drawn(26)[::2]),
    ],
)
def test_projections_that_there_is_no_function_for(name, x):
    given = {"x": drawn(2, 7), "weight": drawn(13, 7), "bias": drawn(13)}
    with pytest.raises(UnsupportedCall, match="expected"):
        describe_linear(**given | {name: x})


# -- products ----------------------------------------------------------------------------------------------------------


def close(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Within what sums of so many products in float32 are off by."""
    expected, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert ((found - expected).abs() <= 2e-6 * size).all()


@NEEDS_CPP
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 20), (17, 1), (13, 33), (64, 300), (128, 1030)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_few_rows(batch, rows, sizes, turned):
    inner, columns = sizes
    a = drawn(*batch, rows, inner)
    b = drawn(*batch, columns, inner, seed=1).mT if turned else drawn(*batch, inner, columns, seed=1)
    close(made(describe_bmm, {"a": a, "b": b}), a, b)


@NEEDS_CPP
@pytest.mark.skipif(platform.machine() != "x86_64", reason="processors of x86-64")
@pytest.mark.parametrize("processor", ["haswell", "skylake", "skylake-avx512", "znver3"])
def test_products_of_few_rows_tuned_for_another_processor(processor, monkeypatch):
    """GCC 12 takes the wrong function for two rows where it tunes for Skylake, if it is let."""
    monkeypatch.setattr(cpp, "FLAGS", (*cpp.FLAGS, f"-mtune={processor}"))
    made_here = cpp.Library(f"state-bmm-{processor}", bmm_library().source)
    monkeypatch.setattr(bmm_module, "bmm_library", lambda: made_here)
    for rows in range(1, 9):
        a, b = drawn(3, rows, 13), drawn(3, 13, 40, seed=1)
        close(made(describe_bmm, {"a": a, "b": b}), a, b)


@NEEDS_CPP
def test_products_of_tensors_where_they_lie():
    """One matrix for all rows of a batch, and gaps around matrices and rows."""
    a = apart(drawn(2, 5, 3, 30).transpose(1, 2), 3)
    for b in (drawn(3, 30, 70), apart(apart(drawn(3, 30, 70), 2), 1)):
        wide = b.expand(2, 3, 30, 70)
        close(made(describe_bmm, {"a": a, "b": wide}), a, wide)
        close(made(describe_bmm, {"a": a.mT.contiguous().mT, "b": wide}), a, wide)
    turned = drawn(5, 70, 30)[::2].mT.expand(2, 3, 30, 70)
    close(made(describe_bmm, {"a": a.contiguous(), "b": turned}), a, turned)
    close(made(describe_bmm, {"a": a[:1].expand(2, -1, -1, -1).contiguous(), "b": turned}), a[:1], turned)


@NEEDS_CPP
@pytest.mark.parametrize("turned", [False, True])
def test_neither_threads_nor_rows_change_a_bit_of_products(turned):
    a = drawn(3, 8, 100)
    b = drawn(3, 2100, 100, seed=1).mT if turned else drawn(3, 100, 2100, seed=1)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(bmm(a, b))
    torch.set_num_threads(before)
    assert all(torch.equal(x, found[0]) for x in found)
    for row in range(8):
        alone = a[:, row : row + 1].contiguous()
        assert torch.equal(bmm(alone, b), found[0][:, row : row + 1])


@NEEDS_CPP
@pytest.mark.parametrize("shapes", [((0, 2, 3), (0, 3, 4)), ((2, 2, 3), (2, 3, 0))], ids=str)
def test_products_of_nothing(shapes):
    a, b = (drawn(*shape) for shape in shapes)
    assert made(describe_bmm, {"a": a, "b": b}).shape == (a @ b).shape


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (drawn(2, 9, 4), drawn(2, 4, 5)),
        (drawn(2, 0, 4), drawn(2, 4, 5)),
        (drawn(2, 3, 0), drawn(2, 0, 5)),
        (drawn(2, 3, 4), drawn(4, 5)),
        (drawn(2, 3, 4), drawn(1, 4, 5)),
        (drawn(2, 3, 4), drawn(2, 3, 5)),
        (drawn(1, 1, 2, 3, 4), drawn(1, 1, 2, 4, 5)),
        (drawn(2, 3, 4), drawn(2, 4, 10)[..., ::2]),
        (drawn(2, 3, 4), drawn(2, 5, 8)[..., ::2].mT),
        (drawn(2, 4, 3).mT, drawn(2, 5, 4).mT),
        (drawn(2, 3, 4).double(), drawn(2, 4, 5).double()),
        (drawn(2, 3, 4), drawn(2, 4, 5).half()),
    ],
)
def test_products_that_there_is_no_function_for(a, b):
    with pytest.raises(UnsupportedCall, match="expected"):
        describe_bmm(a, b)
    if (a.shape[0], a.shape[-1], a.dtype) == (b.shape[0], b.shape[-2], b.dtype):
        assert torch.equal(bmm(a, b), a @ b)


# -- what all of them share --------------------------------------------------------------------------------------------


class _Inner(ctypes.Structure):
    _fields_ = (("k", ctypes.c_int64), ("sizes", ctypes.c_int64 * 2))


class _Outer(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("blocks", _Inner * 2),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_int64),
    )


def test_fields_are_written_by_path():
    fields = {
        "x": Operand("argument", "x", 12),
        "count": 3,
        "softcap": 0.5,
        "blocks.1.k": Operand("scratch", 0),
        "blocks.0.sizes.1": 7,
        "blocks.1.sizes.0": None,
    }
    made = call(None, "nothing", _Outer, fields, {"x": drawn(2, 3), "y": None}, scratch=[8])  # type: ignore[arg-type]
    words = _Outer.from_buffer_copy(made.words)
    assert (words.x, words.count, words.softcap, list(words.blocks[0].sizes)) == (0, 3, 0.5, [0, 7])
    assert made.addresses == ((0, Operand("argument", "x", 12)), (6, Operand("scratch", 0)))
    assert (made.threads, made.parallel) == (9, 10)
    assert list(made.arguments) == ["x"]
    assert made.arguments["x"].strides == (3, 1)


def test_scratch_begins_at_whole_lines():
    assert calls.scratch_places([1, 64, 65, 0]) == ([0, 64, 128, 256], 256)
    assert calls.scratch_places([]) == ([], 0)


def test_strides_are_told_in_bytes_or_numbers():
    x = drawn(2, 1, 3, 4).half().transpose(0, 2)
    assert calls.strides_of("along", x, 3) == {"along.0": 8, "along.1": 0, "along.2": 24}
    assert calls.strides_of("along", x, 2, numbers=True) == {"along.0": 4, "along.1": 0}
    assert calls.strides_of("along", None, 3) == {}


def test_what_is_demanded():
    x = drawn(3, 4)
    assert demand("x", x[:, :2], [torch.float32], (3, 2)).shape == (3, 2)
    for given, dense in ((x[:, :2], True), (x[:, ::2], False), (x.double(), False), (x[:2], False)):
        with pytest.raises(UnsupportedCall, match=r"x Layout.* expected torch\.float32"):
            demand("x", given, [torch.float32], (3, *given.shape[1:]), dense=dense)


@NEEDS_CPP
def test_a_call_takes_what_it_was_described_for():
    given = {"x": drawn(2, 7), "weight": drawn(13, 7)}
    described = describe_linear(**given)
    for name, wrong in (
        ("x", drawn(2, 14)[:, ::2]),
        ("weight", drawn(13, 7).half()),
        ("x", None),
        ("x", bare(given["x"])),
    ):
        with pytest.raises(InputError, match=f"linear was given {name} .* expected Layout"):
            run(described, given | {name: wrong})


def test_lists_are_laid_out_by_place():
    assert flat({"q": 1, "blocks": [2, None], "scale": 0.5}) == {"q": 1, "scale": 0.5, "blocks.0": 2, "blocks.1": None}


@NEEDS_CPP
def test_an_operator_keeps_its_calls_and_falls_back():
    described: list[torch.dtype] = []

    def describe(x: torch.Tensor, weight: torch.Tensor) -> Call:
        described.append(x.dtype)
        return describe_linear(x, weight)

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    operator, weight = Operator(reference, describe), drawn(13, 7)
    for tokens in (2, 3, 2, 3):
        x = drawn(tokens, 7)
        assert torch.equal(operator(x, weight=weight), linear_cpp(x, weight))
    assert described == [torch.float32] * 2
    x, weight = drawn(2, 7).double(), weight.double()
    for _ in range(2):
        assert torch.equal(operator(x, weight), reference(x, weight))
    assert described == [torch.float32, torch.float32, torch.float64]
    assert operator.call({"x": bare(x), "weight": bare(weight)}) is None


def test_codes_of_a_quantized_memory_are_what_attention_reads(entries):
    """Only codes with their scale are: numbers of one byte without one are refused."""
    given = asked(entries, "one row")
    given["block_k"] = [quantize(x, 8).codes for x in given["block_k"]]
    with pytest.raises(UnsupportedCall, match="uint8"):
        describe_attention(**given)
