"""Mixed attention in C++ against the reference: every way of storing entries, every term, odd sizes, blocks, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from semkv.errors import ConfigError, InputError
from semkv.ir.ops import mixed_attention
from semkv.kernels.cpp import compiler
from semkv.kernels.mixed_attention import dispatch, mixed_attention_blocked, mixed_attention_reference
from semkv.kernels.mixed_attention.call import AttentionCall
from semkv.kernels.mixed_attention.cpp import SPLIT_ENTRIES, attention_library, mixed_attention_cpp, tile_rows

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="kernels in C++ need g++ or clang++"),
    pytest.mark.usefixtures("filled_with_nan"),
]

SCALE = 0.3
ODD = {"batch": 2, "tokens": 1, "q_heads": 6, "kv_heads": 2, "dim": 15, "value_dim": 9}
EVEN = {"batch": 1, "tokens": 1, "q_heads": 4, "kv_heads": 2, "dim": 128}
SHAPES = {
    "odd": {**ODD, "exact": 63, "coarse": 11, "biased": True},
    "odd, codes": {**ODD, "exact": 63, "coarse": 75, "bits": (8, 8), "biased": True},
    "odd, short codes": {**ODD, "exact": 5, "coarse": 75, "bits": (4, 4)},
    "odd, codes of keys": {**ODD, "tokens": 3, "exact": 5, "coarse": 31, "bits": (4, 0)},
    "odd, codes of values": {**ODD, "exact": 5, "coarse": 31, "bits": (0, 8)},
    "odd, few": {**ODD, "exact": 1},
    "odd, tokens": {**ODD, "tokens": 5, "exact": 31, "coarse": 3, "biased": True},
    "odd, splits": {**ODD, "batch": 1, "exact": 2 * SPLIT_ENTRIES + 37},
    "odd, codes, splits": {**ODD, "tokens": 2, "coarse": SPLIT_ENTRIES + 301, "bits": (8, 4), "biased": True},
    "one place for all heads": {**ODD, "heads_of_positions": 1, "exact": 111},
    "128": {**EVEN, "exact": 200, "coarse": 70},
    "128, codes": {**EVEN, "exact": 20, "coarse": 270, "bits": (8, 4)},
    "128, tokens": {**EVEN, "tokens": 16, "exact": 77, "biased": True},
}
TERMS = {"plain": (), "all": ("sinks", "softcap", "slopes", "table"), "window": ("sinks", "window")}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [(name, terms, torch.float32) for name in SHAPES for terms in TERMS]
CASES += [(name, "plain", dtype) for name in ("odd", "128") for dtype in DTYPES[1:]]
MORE = [
    (dim, value_dim, group, dtype)
    for dim, value_dim, group in (
        (64, 64, 1),
        (80, 80, 8),
        (96, 96, 3),
        (256, 256, 2),
        (128, 64, 7),
        (63, 111, 5),
        (128, 128, 4),
        (1, 1, 1),
        (40, 40, 12),
        (17, 16, 6),
    )
    for dtype in DTYPES
]


def extras(q: torch.Tensor, terms: tuple[str, ...]) -> dict:
    generator, q_heads = torch.Generator().manual_seed(9), q.shape[1]
    own: dict = {
        "sinks": torch.randn(q_heads, generator=generator),
        "bias_slopes": 0.1 * torch.rand(q_heads, generator=generator),
        "bias_table": torch.randn(q_heads, 13, generator=generator),
        "softcap": 2.0,
        "window": 20,
    }
    names = {"slopes": "bias_slopes", "table": "bias_table"}
    own = {name: x.to(q.dtype) if isinstance(x, torch.Tensor) else x for name, x in own.items()}
    return {"scale": q.shape[3] ** -0.5} | {names.get(term, term): own[names.get(term, term)] for term in terms}


def wide(x):
    """Everything that is a floating-point tensor in float64."""
    if isinstance(x, (list, tuple)):
        return [wide(part) for part in x]
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def root_mean_square(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean().sqrt()


def check(got, q, where, own, options) -> None:
    """The root mean square of the error against float64 is at most twice that of plain PyTorch in the same dtype; of the largest of so
    many errors a few exceed twice another's by the luck of one rounding."""
    options64 = {name: wide(x) for name, x in options.items()}
    exact = mixed_attention_reference(wide(q), where, *wide(own), **options64)
    forms = (mixed_attention_reference, mixed_attention_blocked)
    plain = max(root_mean_square(form(q, where, *own, **options) - exact) for form in forms)
    assert got.dtype == q.dtype
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    assert root_mean_square(got - exact) <= 2 * plain


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_reference(entries, case):
    name, terms, dtype = case
    q, where, own = entries(**SHAPES[name], dtype=dtype)
    options = extras(q, TERMS[terms])
    check(mixed_attention_cpp(q, where, *own, **options), q, where, own, options)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_it_equals_the_reference_at_other_sizes(entries, case):
    dim, value_dim, group, dtype = case
    for tokens, exact, bits, terms in ((1, 333, (8, 4), "plain"), (3, 65, (4, 8), "all")):
        q, where, own = entries(
            batch=1,
            tokens=tokens,
            q_heads=2 * group,
            kv_heads=2,
            dim=dim,
            value_dim=value_dim,
            exact=exact,
            coarse=21,
            bits=bits,
            dtype=dtype,
            biased=True,
        )
        options = extras(q, TERMS[terms])
        check(mixed_attention_cpp(q, where, *own, **options), q, where, own, options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_may_be_stored_in_less_precision_than_queries(entries, dtype):
    q, where, own = entries(**ODD, exact=40, dtype=torch.float32)
    stored = own._replace(block_k=[x.to(dtype) for x in own.block_k])  # values stay as they are
    single = stored._replace(block_k=[x.float() for x in stored.block_k])
    got = mixed_attention_cpp(q, where, *stored, scale=SCALE)
    check(got, q, where, single, {"scale": SCALE})


def test_every_number_of_half_precision_is_read(entries):
    """As keys: subnormals, the largest, and either sign; one entry each, and its own score shows in the weights."""
    bits = torch.arange(-(1 << 15), 1 << 15, 97).to(torch.int16)
    keys = bits.view(torch.float16)
    keys = keys[torch.isfinite(keys)]
    k = torch.zeros(1, 1, len(keys), 15, dtype=torch.float16)
    k[..., 0] = keys
    v = torch.randn(1, 1, len(keys), 9)
    q, where, places = (
        torch.full((1, 3, 1, 15), 1e-3),
        torch.full((1, 1), len(keys)),
        torch.arange(len(keys))[None, None],
    )
    own = ([k], [v], [places])
    check(mixed_attention_cpp(q, where, *own, scale=1.0), q, where, ([k.float()], [v], [places]), {"scale": 1.0})


def part_of_a_buffer(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as the front of longer and wider rows, the rest of which is NaN."""
    buffer = torch.full((*x.shape[:2], x.shape[2] + 5, x.shape[3] + 3), float("nan"), dtype=x.dtype)
    part = buffer[:, :, : x.shape[2], : x.shape[3]]
    return part.copy_(x)


def test_blocks_are_read_where_they_are(entries):
    """Two blocks of all heads, one with a bias, one that only the last head of the first row has and one that is empty; each is part of
    a buffer that holds NaN beside it, and they are not stored alike."""
    q, where, own = entries(**ODD, exact=90, biased=True, dtype=torch.float32)
    k, v, places, bias = own.block_k[0], own.block_v[0], own.block_positions[0], own.block_bias[0]
    cuts = [(slice(0, 2), slice(0, 2), slice(0, 29)), (slice(0, 2), slice(0, 2), slice(29, 90))]
    cuts += [(slice(0, 1), slice(1, 2), slice(0, 70)), (slice(0, 2), slice(0, 2), slice(0, 0))]
    half = part_of_a_buffer(k[cuts[1]].bfloat16())
    ragged = own._replace(
        block_k=[part_of_a_buffer(k[cuts[0]]), half, *(part_of_a_buffer(k[cut]) for cut in cuts[2:])],
        block_v=[part_of_a_buffer(v[cut]) for cut in cuts],
        block_positions=[places[cuts[0]].int(), places[cuts[1]], places[cuts[2]], places[cuts[3]]],
        block_bias=[None, bias[..., 29:], None, None],
        block_heads=[0, 0, 1, 0],
    )
    got = mixed_attention_cpp(q, where, *ragged, scale=SCALE)
    single = ragged._replace(block_k=[x.float() for x in ragged.block_k])
    check(got, q, where, single, {"scale": SCALE})


def test_numbers_that_are_not_dense_are_copied(entries):
    q, where, own = entries(**ODD, exact=33, dtype=torch.float32)
    across = own._replace(block_k=[own.block_k[0].mT.contiguous().mT], block_v=[own.block_v[0].mT.contiguous().mT])
    assert torch.equal(
        mixed_attention_cpp(q, where, *across, scale=SCALE), mixed_attention_cpp(q, where, *own, scale=SCALE)
    )


def test_absent_and_later_entries_have_no_weight(entries):
    q, where, own = entries(**ODD, exact=140, biased=True, dtype=torch.float32)
    own.block_positions[0][:, :, :70] = 1 << 40
    own.block_bias[0][..., 99] = float("-inf")
    wanted = mixed_attention_cpp(q, where, *own, scale=SCALE)
    changed = own._replace(block_k=[own.block_k[0].clone()], block_v=[own.block_v[0].clone()])
    for x in (changed.block_k[0], changed.block_v[0]):
        x[:, :, :70], x[:, :, 99] = 1e30, -1e3
    assert torch.equal(mixed_attention_cpp(q, where, *changed, scale=SCALE), wanted)


@pytest.mark.parametrize("exact", [70, 3 * SPLIT_ENTRIES])
def test_threads_change_no_bit(entries, exact):
    """One thread, two, and four callers at once."""
    q, where, own = entries(**ODD, exact=exact, coarse=9, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(mixed_attention_cpp(q, where, *own, scale=SCALE))
    finally:
        torch.set_num_threads(before)
    with ThreadPoolExecutor(4) as pool:
        found += pool.map(lambda _: mixed_attention_cpp(q, where, *own, scale=SCALE), range(8))
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (5, 5), (8, 8), (9, 5), (12, 6), (16, 8)])
def test_rows_of_a_tile(group, rows):
    assert tile_rows(group) == rows


def test_the_operator_takes_it_by_name_and_by_itself(entries, monkeypatch):
    q, where, own = entries(**ODD, exact=50, dtype=torch.float32)
    wanted = mixed_attention_cpp(q, where, *own, scale=SCALE)
    assert torch.equal(mixed_attention(q, where, *own, scale=SCALE), wanted)
    assert torch.equal(mixed_attention(q, where, *own, scale=SCALE, kernel="cpp"), wanted)
    blocked = mixed_attention_blocked(q, where, *own, scale=SCALE)
    assert torch.equal(mixed_attention(q, where, *own, scale=SCALE, kernel="torch"), blocked)
    monkeypatch.setattr(dispatch, "compiler", lambda: None)
    assert torch.equal(mixed_attention(q, where, *own, scale=SCALE), blocked)
    with pytest.raises(ConfigError, match=r"kernels 'cpp': no C\+\+ compiler was found .*; install one, or use 'auto'"):
        mixed_attention(q, where, *own, scale=SCALE, kernel="cpp")


def test_factored_spans_are_pytorchs(entries):
    q, where, own = entries(**ODD, exact=50, spans=2, dtype=torch.float32)
    assert (
        dispatch.refusal(AttentionCall.of(q, where, *own, scale=SCALE))
        == "factored spans are attended to in matrix products"
    )
    assert dispatch.refusal(AttentionCall.of(q, where, *own[:7], scale=SCALE)) is None


def test_a_kernel_that_does_not_compile_is_a_warning_or_an_error(entries, monkeypatch, tmp_path):
    q, where, own = entries(**ODD, exact=5, dtype=torch.float32)
    wrong = type(attention_library(15, 9, 3))("wrong", "no C++")
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "attention_library", lambda *shape: wrong)
    with pytest.warns(UserWarning, match="PyTorch computes in its place"):
        got = mixed_attention(q, where, *own, scale=SCALE)
    assert torch.equal(got, mixed_attention_blocked(q, where, *own, scale=SCALE))
    with pytest.raises(ConfigError, match="kernel wrong"):
        mixed_attention(q, where, *own, scale=SCALE, kernel="cpp")


def test_what_is_not_of_one_size_is_refused(entries):
    """Before anything is read: addresses do not tell how far it goes."""
    q, where, own = entries(**ODD, exact=50, coarse=4, bits=(8, 8), dtype=torch.float32)
    short = own._replace(block_v=[own.block_v[0][:, :, 1:], own.block_v[1]])
    with pytest.raises(
        InputError, match=r"keys, values and scales of a block are of .* heads and entries; expected one size"
    ):
        mixed_attention_cpp(q, where, *short, scale=SCALE)
    with pytest.raises(InputError, match=r"the scale of a block's codes is torch\.float32; expected torch\.float16"):
        mixed_attention_cpp(q, where, *own._replace(block_k_scale=[None, own.block_k_scale[1].float()]), scale=SCALE)
    for bad in (own._replace(block_positions=[own.block_positions[0][..., 1:], own.block_positions[1]]), own):
        with pytest.raises(RuntimeError, match="expand"):
            mixed_attention_cpp(q, where if bad is not own else where[:, :0], *bad, scale=SCALE)
    many = q.expand(-1, -1, 22, -1)
    with pytest.raises(InputError, match="22 queries for each of 3 heads of a group; expected 64 rows at most"):
        mixed_attention_cpp(many, where.expand(-1, 22), *own, scale=SCALE)
