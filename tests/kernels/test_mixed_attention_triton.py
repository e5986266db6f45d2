"""Triton's mixed attention against the reference: every axis that a specialisation has, odd sizes, pages, errors."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.ir.memory import Entries
from semkv.kernels.mixed_attention import mixed_attention_blocked, mixed_attention_reference
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.paged import PagedTokens

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')

from semkv.kernels.mixed_attention.triton import block_for, mixed_attention_launches, mixed_attention_triton, splits_for
from tests.conftest import quick_ones

SCALE = 0.3
BLOCKS = ("block_k", "block_v", "block_positions", "block_bias", "block_k_scale", "block_v_scale")
SMALL = {"batch": 1, "tokens": 1}
SHAPES = {
    "exact, group 1": {**SMALL, "q_heads": 1, "kv_heads": 1, "dim": 60, "exact": 63},
    "exact, group 4, dim 64": {**SMALL, "batch": 2, "q_heads": 4, "kv_heads": 1, "dim": 64, "exact": 33},
    "group 5, dim 128": {**SMALL, "q_heads": 5, "kv_heads": 1, "dim": 128, "exact": 9, "coarse": 7},
    "value dim": {**SMALL, "batch": 3, "q_heads": 8, "dim": 6, "value_dim": 9, "coarse": 4, "spans": 2},
    "all kinds, odd": {
        **SMALL,
        "dim": 15,
        "exact": 31,
        "coarse": 11,
        "spans": 3,
        "length": 7,
        "rank": 5,
        "biased": True,
    },
    "tokens": {"batch": 2, "tokens": 3, "q_heads": 4, "kv_heads": 1, "coarse": 3, "spans": 1, "biased": True},
    "one place for all heads": {**SMALL, "heads_of_positions": 1, "exact": 19, "spans": 1, "length": 21},
    "codes": {**SMALL, "dim": 64, "exact": 20, "coarse": 40, "bits": (8, 8), "biased": True},
    "short codes, group 4": {**SMALL, "q_heads": 4, "kv_heads": 1, "dim": 60, "coarse": 33, "bits": (4, 4)},
    "codes of two widths, odd": {
        "batch": 2,
        "tokens": 3,
        "dim": 15,
        "value_dim": 9,
        "coarse": 17,
        "bits": (4, 8),
        "spans": 1,
    },
    "codes of keys": {**SMALL, "coarse": 9, "bits": (4, 0)},
    "two blocks of rows": {
        "batch": 1,
        "tokens": 17,
        "q_heads": 4,
        "kv_heads": 1,
        "exact": 5,
        "spans": 1,
        "biased": True,
    },
}
TERMS = {
    "plain": (),
    "sinks, soft-cap, slopes, table": ("sinks", "softcap", "slopes", "table"),
    "window": ("sinks", "window"),
}
DRAWS = 5
HALF_ONLY = "group 5, dim 128"
"""In float32 the interpreter's product sums 128 terms in sequence, as a GPU does, and MKL in parts: 2.8 times its error."""

CASES = [
    *((name, "plain", 1, torch.float32) for name in SHAPES if name != HALF_ONLY),
    (HALF_ONLY, "plain", 1, torch.float16),
    ("all kinds, odd", "sinks, soft-cap, slopes, table", 3, torch.float32),
    ("all kinds, odd", "window", 2, torch.float32),
    ("tokens", "sinks, soft-cap, slopes, table", 2, torch.float32),
    ("all kinds, odd", "plain", 4, torch.float16),
    ("all kinds, odd", "plain", 4, torch.bfloat16),
    ("group 5, dim 128", "window", 2, torch.bfloat16),
    ("exact, group 1", "plain", 8, torch.float32),  # more splits than tiles
    *(
        (name, "plain", 2, dtype)
        for name in ("codes", "short codes, group 4")
        for dtype in (torch.float16, torch.bfloat16)
    ),
    ("codes of two widths, odd", "sinks, soft-cap, slopes, table", 3, torch.float32),
    ("codes", "window", 3, torch.float32),
]
MORE = [
    (name, terms, splits, dtype)
    for name in SHAPES
    for terms in TERMS
    for splits in (1, 2, 8)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if (name, terms, splits, dtype) not in CASES and (name, dtype) != (HALF_ONLY, torch.float32)
]


def extras(q_heads: int, dim: int, terms: tuple[str, ...]) -> dict:
    generator = torch.Generator().manual_seed(9)
    out: dict = {"scale": dim**-0.5}
    if "sinks" in terms:
        out["sinks"] = torch.randn(q_heads, generator=generator)
    if "slopes" in terms:
        out["bias_slopes"] = 0.1 * torch.rand(q_heads, generator=generator)
    if "table" in terms:
        out["bias_table"] = torch.randn(q_heads, 13, generator=generator)
    if "softcap" in terms:
        out["softcap"] = 2.0
    if "window" in terms:
        out["window"] = 20
    return out


def cast(values, dtype: torch.dtype) -> list:
    """Numbers in `dtype`; scales of codes stay what they are."""
    if isinstance(values, Entries):
        named = {name: x for name, x in values._asdict().items() if not name.endswith("_scale")}
        return list(values._replace(**dict(zip(named, cast(named.values(), dtype)))))
    return [
        cast(x, dtype)
        if isinstance(x, list)
        else x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in values
    ]


def largest(error: torch.Tensor) -> torch.Tensor:
    return error.abs().max()


def root_mean_square(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean().sqrt()


def errors(got, q, where, own, options, dtype, on_device=None) -> tuple[torch.Tensor, ...]:
    """What is wrong with the kernel's result, and with those of plain PyTorch in the same dtype (by `on_device` where it is given): flat
    differences from float64.

    Plain PyTorch is the reference and the blocked form: products of one row and of many are summed in different orders.
    """

    def run(function, kind, on_device=None):
        named = dict(zip(options, cast(options.values(), kind)))
        arguments = q.to(kind), where, *cast(own, kind)
        return (
            function(*arguments, **named) if on_device is None else on_device(function, *arguments, **named)
        ).double()

    exact = run(mixed_attention_reference, torch.float64)
    assert got.dtype == dtype
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    forms = (mixed_attention_reference, mixed_attention_blocked)
    return tuple((x - exact).flatten() for x in (got, *(run(form, dtype, on_device) for form in forms)))


def check(got, q, where, own, options, dtype) -> None:
    """The largest error is at most twice that of the worse of plain PyTorch's."""
    ours, *plain = map(largest, errors(got, q, where, own, options, dtype))
    assert ours <= 2 * max(plain)


def run_case(on_device, entries, case, norm) -> None:
    """Of draws together, as the error of plain PyTorch in one differs severalfold; and that of where the kernel runs: a GPU's exponential
    and sums are not a CPU's."""
    name, terms, splits, dtype = case
    configuration, found = Configuration(block=16, splits=splits), []
    for seed in range(DRAWS):
        q, where, own = entries(**SHAPES[name], dtype=dtype, seed=seed)
        options = extras(q.shape[1], q.shape[3], TERMS[terms])
        got = on_device(mixed_attention_triton, q, where, *own, **options, configuration=configuration)
        found.append(errors(got, q, where, own, options, dtype, on_device))
    ours, *plain = (norm(torch.cat(parts)) for parts in zip(*found))
    assert ours <= 2 * max(plain)


@pytest.mark.parametrize("case", quick_ones(CASES, list(CASES)[::2]))
def test_the_kernel_equals_the_reference(on_device, entries, case):
    run_case(on_device, entries, case, largest)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_the_kernel_equals_the_reference_in_every_combination(on_device, entries, case):
    """By the mean error: of the largest of so many comparisons a few exceed twice another's by the luck of one rounding."""
    run_case(on_device, entries, case, root_mean_square)


def test_blocks_are_read_where_they_are(on_device, entries):
    """Two blocks of all heads, one with a bias, and one that only the last head of the first row has; each is part of a buffer
    that holds NaN beside it."""
    q, where, own = entries(batch=2, tokens=1, exact=20, coarse=9, bits=(8, 4), biased=True, dtype=torch.float32)
    k, v, places, bias = own.block_k[0], own.block_v[0], own.block_positions[0], own.block_bias[0]
    ragged = own._replace(
        block_k=[part_of_a_buffer(x) for x in (k[:, :, :9], k[:, :, 9:], k[:1, 1:, :4], own.block_k[1])],
        block_v=[part_of_a_buffer(x) for x in (v[:, :, :9], v[:, :, 9:], v[:1, 1:, :4], own.block_v[1])],
        block_positions=[places[:, :, :9], places[:, :, 9:], places[:1, 1:, :4], own.block_positions[1]],
        block_bias=[None, bias[..., 9:], None, own.block_bias[1]],
        block_heads=[0, 0, 1, 0],
        block_k_scale=[None, None, None, part_of_a_buffer(own.block_k_scale[1])],
        block_v_scale=[None, None, None, part_of_a_buffer(own.block_v_scale[1])],
    )
    got = on_device(
        mixed_attention_triton, q, where, *ragged, scale=SCALE, configuration=Configuration(block=16, splits=2)
    )
    check(got, q, where, ragged, {"scale": SCALE}, torch.float32)


def part_of_a_buffer(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as the front of longer rows whose ends are NaN, of codes 255."""
    other = float("nan") if x.is_floating_point() else 255
    buffer = torch.full((*x.shape[:2], x.shape[2] + 5, x.shape[3]), other, dtype=x.dtype)
    buffer[:, :, : x.shape[2]] = x
    return buffer[:, :, : x.shape[2]]


@pytest.mark.parametrize("splits", [1, 3])
def test_two_dtypes_are_one_softmax(on_device, entries, splits):
    """Keys in half precision under queries in single, beside means in single that only the second row's heads have."""
    q, where, own = entries(batch=2, tokens=1, exact=20, coarse=3, dtype=torch.float32)
    mixed = own._replace(
        block_k=[own.block_k[0].half(), own.block_k[1][1:]],
        block_v=[own.block_v[0].half(), own.block_v[1][1:]],
        block_positions=[own.block_positions[0], own.block_positions[1][1:]],
        block_bias=[None, own.block_bias[1][1:]],
        block_heads=[0, 2],
    )
    got = on_device(
        mixed_attention_triton, q, where, *mixed, scale=SCALE, configuration=Configuration(block=16, splits=splits)
    )
    single = mixed._replace(block_k=[x.float() for x in mixed.block_k], block_v=[x.float() for x in mixed.block_v])
    check(got, q, where, single, {"scale": SCALE}, torch.float32)


def pool(page_size: int, heads: int, dtype: torch.dtype = torch.float32) -> PagedTokens:
    """Two rows with 13 and 5 tokens in shuffled pages of one pool; what no row owns is NaN."""
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([13, 5], dtype=torch.int32)
    width = -(-13 // page_size)
    own = 2 * heads * width + 1
    slots = own * page_size
    order = torch.randperm(own, generator=generator)[:-1].to(torch.int32).view(2, heads, width)
    k, v = (torch.randn(2, slots, 6, generator=generator).to(dtype) for _ in range(2))
    positions = torch.randint(0, 50, (heads, slots), generator=generator, dtype=torch.int32)
    used = torch.zeros(2, slots, dtype=torch.bool)
    for row in range(2):
        for head in range(2):
            entry = torch.arange(int(counts[row]))
            used[head, order[row, min(head, heads - 1)][entry // page_size].long() * page_size + entry % page_size] = (
                True
            )
    return PagedTokens(
        k.masked_fill(~used[..., None], float("nan")),
        v.masked_fill(~used[..., None], float("nan")),
        positions,
        order,
        counts,
        page_size,
    )


@pytest.mark.parametrize(
    ("page_size", "heads", "biased", "bits"), [(1, 2, False, (0, 0)), (4, 1, True, (0, 0)), (16, 2, True, (8, 4))]
)
def test_tokens_are_read_from_their_pages(on_device, entries, page_size, heads, biased, bits):
    """Ragged rows: what a row does not have is neither read nor counted."""
    paged = pool(page_size, heads)
    q, where, own = entries(batch=2, tokens=1, coarse=3, bits=bits, dtype=torch.float32)
    rest = own._replace(**{name: given[1:] for name in BLOCKS if (given := getattr(own, name)) is not None})
    bias = torch.randn(2, 4, 1, paged.capacity) if biased else None
    k, v, places, absent = paged.gathered(bias)
    whole = own._replace(
        block_k=[k, rest.block_k[0]],
        block_v=[v, rest.block_v[0]],
        block_positions=[places, rest.block_positions[0]],
        block_bias=[absent, rest.block_bias[0]],
    )
    got = on_device(
        mixed_attention_triton,
        q,
        where,
        *rest,
        scale=SCALE,
        paged=paged,
        paged_bias=bias,
        configuration=Configuration(block=16, splits=2),
    )
    check(got, q, where, whole, {"scale": SCALE}, torch.float32)


def test_gathered_pages_are_the_tokens_in_order():
    paged = pool(4, 2)
    k, v, places, bias = paged.gathered()
    assert torch.isfinite(k).all()
    assert torch.isfinite(v).all()
    assert (bias[:, 0, 0] == 0).sum(1).tolist() == [13, 5]
    slot = int(paged.pages[1, 0, 1]) * 4  # token 4 of row 1 opens its second page
    assert torch.equal(k[1, 0, 4], paged.k[0, slot])
    assert torch.equal(v[1, 0, 4], paged.v[0, slot])
    assert places[1, 0, 4] == paged.positions[0, slot]


def test_what_cannot_be_launched_is_refused(entries):
    q, where, own = entries(**SMALL)
    with pytest.raises(InputError, match=r"q is torch\.float64; the kernel computes in float16"):
        mixed_attention_launches(q, where, *own, scale=SCALE)
    q = q.float()
    with pytest.raises(InputError, match="neither blocks nor `paged` tokens are given"):
        mixed_attention_launches(q, where, scale=SCALE)
    one = own._replace(block_k=[x[:, :1] for x in own.block_k], block_v=[x[:, :1] for x in own.block_v])
    with pytest.raises(InputError, match="4 query heads for 1 or 2 KV heads"):
        mixed_attention_launches(q, where, *one, scale=SCALE, paged=pool(4, 1))
    with pytest.raises(InputError, match="3 query heads for 2 KV heads"):
        mixed_attention_launches(q[:, :3], where, *own, scale=SCALE)
    paged = pool(4, 1)
    with pytest.raises(InputError, match="page_size is 7 for"):
        PagedTokens(paged.k, paged.v, paged.positions, paged.pages, paged.counts, 7)
    with pytest.raises(InputError, match=r"'counts' is torch\.int64"):
        PagedTokens(paged.k, paged.v, paged.positions, paged.pages, paged.counts.long(), 4)


@pytest.mark.parametrize(
    ("programs", "tiles", "processors", "splits"),
    [(8, 200, 132, 128), (264, 100, 132, 4), (2000, 100, 132, 1), (8, 3, 132, 4), (8, 53, 132, 64), (1, 0, 132, 1)],
)
def test_splits_make_eight_programs_per_processor_and_most_have_a_tile(programs, tiles, processors, splits):
    assert splits_for(programs, tiles, processors) == splits


@pytest.mark.parametrize(
    ("dims", "dtype", "plain", "block"),
    [
        ((128, 128), torch.bfloat16, True, 128),
        ((128, 128), torch.float32, True, 64),
        ((192, 128), torch.bfloat16, True, 64),
        ((256, 256), torch.float32, True, 32),
        ((60, 60), torch.float32, True, 128),
        ((128, 128), torch.bfloat16, False, 32),
    ],
)
def test_a_tile_fits_into_shared_memory(dims, dtype, plain, block):
    assert block_for(dims, dtype, plain=plain) == block
