"""`semkv::mixed_attention`: the blocked implementation against the reference that rebuilds everything."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import semkv.kernels.codes as codes
import semkv.kernels.mixed_attention.blocked as blocked
import semkv.kernels.mixed_attention.streaming as streaming
from semkv.errors import InputError
from semkv.ir.memory import Entries
from semkv.ir.ops import mixed_attention
from semkv.kernels.mixed_attention import FLOAT_ARGUMENTS, mixed_attention_blocked, mixed_attention_reference
from semkv.runtime.store.quantization import Quantized, dequantize, quantize

SCALE = 0.4
SHAPES = {
    "exact": {},
    "one head": {"q_heads": 1, "kv_heads": 1, "coarse": 2},
    "multi-query": {"q_heads": 3, "kv_heads": 1, "coarse": 3, "spans": 1},
    "multi-head": {"q_heads": 3, "kv_heads": 3, "spans": 2, "biased": True},
    "odd": {"dim": 15, "exact": 63, "coarse": 11, "spans": 3, "length": 7, "rank": 5, "biased": True},
    "value dim": {"dim": 6, "value_dim": 9, "coarse": 4, "spans": 2},
    "shared positions": {"heads_of_positions": 1, "exact": 111, "spans": 2},
    "one token": {"tokens": 1, "coarse": 5, "spans": 2, "biased": True},
    "long span": {"spans": 1, "length": 31, "rank": 1, "exact": 1},
    "codes": {"coarse": 70, "bits": (8, 8), "spans": 1, "biased": True},
    "short codes, odd dims": {"dim": 15, "value_dim": 9, "coarse": 33, "bits": (4, 4)},
    "codes of keys": {"tokens": 1, "coarse": 9, "bits": (4, 0)},
    "codes of two widths": {"dim": 15, "coarse": 9, "bits": (8, 4)},
}
TERMS = ("sinks", "slopes", "table", "softcap", "window")
FACTORED = ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v", "factored_positions")
BLOCKS = ("block_k", "block_v", "block_positions", "block_bias", "block_k_scale", "block_v_scale")


def extras(q_heads: int, terms: tuple[str, ...], dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(9)
    out: dict = {"scale": SCALE}
    if "sinks" in terms:
        out["sinks"] = torch.randn(q_heads, generator=generator, dtype=torch.float64).to(dtype)
    if "slopes" in terms:
        out["bias_slopes"] = 0.1 * torch.rand(q_heads, generator=generator, dtype=torch.float64).to(dtype)
    if "table" in terms:
        out["bias_table"] = torch.randn(q_heads, 13, generator=generator, dtype=torch.float64).to(dtype)
    if "softcap" in terms:
        out["softcap"] = 2.0
    if "window" in terms:
        out["window"] = 20
    return out


@pytest.mark.parametrize(
    "terms", [(), *((term,) for term in TERMS if term != "window"), TERMS[:-1], ("sinks", "window")]
)
@pytest.mark.parametrize("name", SHAPES)
def test_blocked_equals_reference(entries, name, terms):
    q, where, own = entries(**SHAPES[name])
    options = extras(q.shape[1], terms)
    expected = mixed_attention_reference(q, where, *own, **options)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(mixed_attention_blocked(q, where, *own, **options), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scores", [1, 200, 1000])
def test_the_block_size_changes_nothing(entries, monkeypatch, scores):
    q, where, own = entries(tokens=11, coarse=3, spans=2, biased=True)
    options = extras(4, TERMS[:-1])
    whole = mixed_attention_blocked(q, where, *own, **options)
    monkeypatch.setattr(blocked, "BLOCK_SCORES", scores)
    torch.testing.assert_close(mixed_attention_blocked(q, where, *own, **options), whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scores", [300, 1 << 23])
@pytest.mark.parametrize("terms", [(), ("window",), ("sinks", "softcap"), ("slopes",), ("table", "window")])
def test_a_fresh_forward_equals_the_reference(monkeypatch, terms, scores):
    """With and without PyTorch's fused kernel, whole and in blocks."""
    monkeypatch.setattr(blocked, "BLOCK_SCORES", scores)
    torch.manual_seed(0)
    tokens = 63
    q = torch.randn(2, 4, tokens, 15, dtype=torch.float64)
    k, v = torch.randn(2, 2, tokens, 15, dtype=torch.float64), torch.randn(2, 2, tokens, 7, dtype=torch.float64)
    where = torch.arange(tokens).expand(2, -1)
    options = extras(4, terms)
    expected = mixed_attention_reference(q, where, [k], [v], [where[:, None]], **options)
    got = mixed_attention_blocked(q, where, [k], [v], [where[:, None]], **options, fresh=True)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def divided(own: Entries, edges: tuple[int, ...]) -> Entries:
    """The same entries, each block in blocks that end at `edges`."""

    def cut(blocks: list[torch.Tensor | None] | None, dim: int) -> list[torch.Tensor | None] | None:
        parts: list[torch.Tensor | None] = []
        for x, k in zip(blocks or (), own.block_k):
            ends = [0, *(edge for edge in edges if edge < k.shape[2]), k.shape[2]]
            parts += [None if x is None else x.narrow(dim, start, end - start) for start, end in pairwise(ends)]
        return None if blocks is None else parts

    return own._replace(**{name: cut(getattr(own, name), 3 if name == "block_bias" else 2) for name in BLOCKS})


@pytest.mark.parametrize("terms", [(), ("sinks", "slopes", "softcap"), ("table", "window")])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_are_one_list_of_entries(entries, name, terms):
    """Wherever entries are cut, and with a bias for some blocks only: the reference with whole blocks."""
    q, where, own = entries(**SHAPES[name])
    options = extras(q.shape[1], terms)
    expected = mixed_attention_reference(q, where, *own, **options)
    for edges in ((1,), (2, 2, 40), (0, 4)):
        for function in (mixed_attention_reference, mixed_attention_blocked):
            got = function(q, where, *divided(own, edges), **options)
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    if own.block_bias is not None and own.block_bias[0] is not None:
        own.block_bias[0][..., :1] = 0
        expected = mixed_attention_reference(q, where, *own, **options)
        some = divided(own, (1,))
        some = some._replace(block_bias=[None, *some.block_bias[1:]])
        torch.testing.assert_close(mixed_attention(q, where, *some, **options), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("terms", [(), TERMS[:-1]])
def test_blocks_may_be_of_some_rows_and_heads(entries, tokens, terms):
    """Ragged heads without padding: each place (row, KV head) alone gives the same output."""
    q, where, own = entries(
        batch=2, tokens=tokens, q_heads=6, kv_heads=3, exact=70, coarse=40, bits=(8, 4), spans=2, biased=True
    )
    options = extras(6, terms)
    cuts = [
        (0, (0, 0, 3), 0, 9),
        (0, (0, 0, 2), 9, 30),
        (0, (0, 2, 3), 9, 11),
        (0, (1, 0, 1), 0, 70),
        (0, (1, 1, 3), 5, 5),
        (1, (0, 1, 3), 0, 40),
        (1, (1, 0, 2), 3, 20),
        (0, (1, 1, 3), 60, 70),
    ]
    ragged = own._replace(
        **{name: [part_of(own, name, *cut) for cut in cuts] for name in BLOCKS},
        block_heads=[3 * row + a for _, (row, a, _), _, _ in cuts],
    )
    got = mixed_attention(q, where, *ragged, **options)
    torch.testing.assert_close(mixed_attention_reference(q, where, *ragged, **options), got, rtol=1e-10, atol=1e-12)
    for row in range(2):
        for head in range(3):
            here = [
                (block, (row, head, head + 1), i, j) for block, (r, a, b), i, j in cuts if r == row and a <= head < b
            ]
            heads = slice(2 * head, 2 * head + 2)
            one = Entries(
                **{name: [part_of(own, name, *cut) for cut in here] for name in BLOCKS},
                **{name: getattr(own, name)[row : row + 1, [head]] for name in FACTORED},
                factored_bias=own.factored_bias[row : row + 1, heads],
            )
            own_options = {name: x[heads] if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            alone = mixed_attention_reference(q[row : row + 1, heads], where[:1], *one, **own_options)
            torch.testing.assert_close(got[row, heads], alone[0], rtol=1e-10, atol=1e-12)


def part_of(
    own: Entries, name: str, block: int, heads: tuple[int, int, int], first: int, last: int
) -> torch.Tensor | None:
    """Of one tensor of a block, its entries [first, last) of KV heads [a, b) of a row."""
    x, (row, a, b) = getattr(own, name)[block], heads
    if x is None:
        return None
    if name == "block_bias":
        return x[row : row + 1, 2 * a : 2 * b][..., first:last] if x.shape[1] > 1 else x[row : row + 1, ..., first:last]
    return x[row : row + 1, a:b, first:last] if x.shape[1] > 1 else x[row : row + 1, :, first:last]


def packed(x: torch.Tensor, bits: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    made = quantize(x, bits)
    return [made.codes], [made.scale]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dim", "value_dim"), [(15, 15), (6, 9)])
def test_codes_alone(entries, bits, dim, value_dim):
    """Values of another dim than the keys' need a plain block, which may be empty, to say so."""
    q, where, own = entries(dim=dim, value_dim=value_dim)
    (k, k_scale), (v, v_scale) = packed(own.block_k[0], bits), packed(own.block_v[0], bits)
    coded = own._replace(block_k=k, block_v=v, block_k_scale=k_scale, block_v_scale=v_scale)
    if dim != value_dim:
        with pytest.raises(
            InputError, match=f"codes are torch.uint8 with {v[0].shape[3]} bytes a vector; expected torch.uint8 with 6"
        ):
            mixed_attention(q, where, *coded, scale=SCALE)
        coded = divided(coded, (0,))
        coded.block_v[0], coded.block_v_scale[0] = own.block_v[0][:, :, :0], None
    plain = own._replace(
        block_k=[dequantize(Quantized(k[0], k_scale[0], bits, dim))],
        block_v=[dequantize(Quantized(v[0], v_scale[0], bits, value_dim))],
    )
    expected = mixed_attention_reference(q, where, *plain, scale=SCALE)
    for function in (mixed_attention_reference, mixed_attention):
        torch.testing.assert_close(function(q, where, *coded, scale=SCALE), expected, rtol=1e-10, atol=1e-12)


def test_reading_codes_allocates_no_more_than_a_tile(entries, monkeypatch):
    """Of the numbers that many codes stand for, a tile at a time."""
    monkeypatch.setattr(codes, "TILE_NUMBERS", 1 << 10)
    count = 4096
    q, where, own = entries(batch=1, tokens=1, dim=64, coarse=count, bits=(4, 4), dtype=torch.float32)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            made = [x for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, torch.Tensor)]
            largest = max(largest, *(x.untyped_storage().nbytes() for x in made if x.dtype.is_floating_point), 0)
            return out

    with torch.no_grad(), Watch():
        got = mixed_attention_blocked(q, where, *own, scale=SCALE)
    assert largest < count * 64  # the scores and biases of all heads; the means are eight times that
    torch.testing.assert_close(got, mixed_attention_reference(q, where, *own, scale=SCALE))


def test_blocks_that_do_not_fit_are_refused(entries):
    q, where, own = entries()
    for bad in (own.block_k[0].to(torch.uint8), own.block_k[0][..., :5]):
        with pytest.raises(
            InputError, match=r"keys or values of a block are .* numbers; expected 6 floating-point ones, or codes"
        ):
            mixed_attention(q, where, *own._replace(block_k=[bad]), scale=SCALE)
    with pytest.raises(InputError, match="1 blocks and block_heads 2 first places; expected at least one block"):
        mixed_attention(q, where, *own._replace(block_heads=[0, 1]), scale=SCALE)
    with pytest.raises(InputError, match="no block has places 0 to 0"):
        mixed_attention(
            q,
            where,
            *(
                x[:1] if isinstance(x, torch.Tensor) else x
                for x in own._replace(
                    block_k=[own.block_k[0][:1, :1]],
                    block_v=[own.block_v[0][:1, :1]],
                    block_positions=[own.block_positions[0][:1, :1]],
                    block_heads=[1],
                )
            ),
            scale=SCALE,
        )
    with pytest.raises(InputError, match="4 query heads for 3 KV heads of 1 rows; expected a multiple"):
        mixed_attention(
            q[:1], where[:1], *own._replace(block_k=[own.block_k[0][:1, :1]] * 1, block_heads=[2]), scale=SCALE
        )
    leaf = own.block_k[0].new_zeros(2, 1, 1, 7).requires_grad_()
    pair = divided(own, (3,))._replace(block_bias=[None, leaf[..., 3:]])
    with pytest.raises(InputError, match="a list of tensors and None takes no gradient"):
        mixed_attention(q.clone().requires_grad_(), where, *pair, scale=SCALE)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 63, 511, 512, 1111])
def test_streamed_products_equal_matrix_products(stored, count):
    """Entries that are views of larger stores, whole bags and what is left of them, against float64."""
    generator = torch.Generator().manual_seed(count)
    store = torch.randn(3, 1200, 60, generator=generator).to(stored)
    q, weights = torch.randn(3, 2, 60, generator=generator), torch.rand(3, 2, count, generator=generator)
    entries = store[:, :count]
    for got, left, right in (
        (streaming.scores(q, entries), q, entries.mT),
        (streaming.weighted_sum(weights, entries), weights, entries),
    ):
        exact = left.double() @ right.double()
        plain = (left @ right.float() - exact).abs().max()
        assert (got - exact).abs().max() <= 2 * plain + 1e-7
    assert torch.equal(
        streaming.weighted_sum(weights[:1], store[1:2, :count]),
        streaming.weighted_sum(weights[:1], store[1:2, :count].clone()),
    )


def test_fresh_entries_with_a_bias_are_not_left_to_the_fused_kernel(entries):
    q, where, own = entries(exact=3, tokens=3)
    own = own._replace(
        block_positions=[where[:, None]], block_bias=[torch.tensor([0.0, 1.0, 2.0]).expand(2, 1, 1, 3).double()]
    )
    expected = mixed_attention_reference(q, where, *own, scale=SCALE)
    torch.testing.assert_close(mixed_attention_blocked(q, where, *own, scale=SCALE, fresh=True), expected)


def test_one_softmax_over_all_kinds(entries):
    """Factored entries are tokens in another form: rebuilt and given as exact ones they change nothing."""
    q, where, own = entries(coarse=3, spans=2, biased=True)
    keys = ((own.key_u * own.key_s[..., None, :]) @ own.key_v.mT).flatten(2, 3)
    values = ((own.value_u * own.value_s[..., None, :]) @ own.value_v.mT).flatten(2, 3)
    k, v = torch.cat((*own.block_k, keys), 2), torch.cat((*own.block_v, values), 2)
    places = torch.cat((*(x.expand(-1, 2, -1) for x in own.block_positions), own.factored_positions.flatten(2, 3)), 2)
    bias = torch.cat((*(x.expand(2, 4, 3, -1) for x in own.block_bias), own.factored_bias.flatten(3, 4)), 3)
    joined = mixed_attention(q, where, [k], [v], [places], [bias], scale=SCALE)
    torch.testing.assert_close(mixed_attention(q, where, *own, scale=SCALE), joined)


def test_absent_and_later_entries_have_no_weight(entries):
    """Whatever finite numbers hidden entries hold, the output is bit for bit the same."""
    q, where, own = entries(exact=9, coarse=4, spans=2, biased=True)
    own.block_positions[0][:, :, 0] = 99
    own.block_bias[0][..., 1] = float("-inf")
    gone = torch.zeros(2, 2, 9, dtype=torch.bool)
    gone[..., :2] = True
    expected = mixed_attention(q, where, *own, scale=SCALE)
    k = own.block_k[0].masked_fill(gone[..., None], 1e3)
    v = own.block_v[0].masked_fill(gone[..., None], -1e30)
    dropped = own.block_bias[1][:, :, 0, :, None].expand(-1, 2, -1, 6) == float("-inf")
    assert dropped.any()
    changed = own._replace(block_k=[k, own.block_k[1]], block_v=[v, own.block_v[1].masked_fill(dropped, 1e30)])
    assert torch.equal(mixed_attention(q, where, *changed, scale=SCALE), expected)
    visible = own._replace(block_v=[own.block_v[0] + 1.0, own.block_v[1]])
    assert not torch.equal(mixed_attention(q, where, *visible, scale=SCALE), expected)


def test_padding_of_ragged_factors_changes_nothing(entries):
    """Zero rows and ranks, with bias -inf on the rows, are how spans of different sizes share a tensor."""
    q, where, own = entries(spans=2, length=5, rank=3)
    expected = mixed_attention(q, where, *own, scale=SCALE)
    wider = own._replace(
        key_u=F.pad(own.key_u, (0, 2, 0, 4)),
        value_u=F.pad(own.value_u, (0, 2, 0, 4)),
        key_s=F.pad(own.key_s, (0, 2)),
        value_s=F.pad(own.value_s, (0, 2)),
        key_v=F.pad(own.key_v, (0, 2)),
        value_v=F.pad(own.value_v, (0, 2)),
        factored_positions=F.pad(own.factored_positions, (0, 4)),
        factored_bias=F.pad(own.factored_bias, (0, 4), value=float("-inf")),
    )
    torch.testing.assert_close(mixed_attention(q, where, *wider, scale=SCALE), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_is_at_most_twice_that_of_plain_pytorch(dtype):
    """Against float64, in the same dtype, exact entries only: what plain PyTorch can do as well."""
    torch.manual_seed(1)
    q = torch.randn(2, 4, 9, 60).to(dtype)
    k, v = torch.randn(2, 2, 111, 60).to(dtype), torch.randn(2, 2, 111, 60).to(dtype)
    where, places = torch.arange(102, 111).expand(2, -1), torch.arange(111).expand(2, 1, -1)
    visible = places[:, :, None, :] <= where[:, None, :, None]
    exact = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=visible, scale=SCALE, enable_gqa=True
    )
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=SCALE, enable_gqa=True)
    ours = mixed_attention(q, where, [k], [v], [places], scale=SCALE)
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()
    assert (ours - exact).abs().max() > 0


def test_keys_may_be_stored_in_less_precision_than_queries(entries):
    q, where, own = entries(coarse=2)
    half = own._replace(block_k=[x.half() for x in own.block_k], block_v=[x.half() for x in own.block_v])
    wide = own._replace(block_k=[x.double() for x in half.block_k], block_v=[x.double() for x in half.block_v])
    got = mixed_attention(q, where, *half, scale=SCALE)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, mixed_attention(q, where, *wide, scale=SCALE))


@pytest.mark.parametrize("name", ["odd", "value dim", "multi-query", "codes"])
@pytest.mark.parametrize("blocks", [False, True])
def test_gradients_equal_autograd_through_the_reference(entries, name, blocks):
    q, where, own = entries(**SHAPES[name])
    own = own._replace(
        block_bias=[
            q.new_zeros(2, 1, 1, k.shape[2]) if bias is None else bias for k, bias in zip(own.block_k, own.block_bias)
        ]
    )
    own = divided(own, (3, 5)) if blocks else own
    options = extras(q.shape[1], ("sinks", "slopes", "softcap", "table"))
    keywords = {key: options[key] for key in ("scale", "softcap")}
    arguments = [q, where, *own, *(options[key] for key in ("sinks", "bias_slopes", "bias_table"))]

    def leaf(x):
        if isinstance(x, list):
            return [leaf(part) for part in x]
        return x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def gradients(function) -> list[torch.Tensor | None]:
        leaves = [leaf(x) if place in FLOAT_ARGUMENTS else x for place, x in enumerate(arguments)]
        out = function(*leaves, **keywords)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found = [leaves[place] for place in FLOAT_ARGUMENTS if leaves[place] is not None]
        return [part.grad for x in found for part in (x if isinstance(x, list) else [x]) if part.requires_grad]

    ours, reference = gradients(mixed_attention), gradients(mixed_attention_reference)
    assert len(ours) == len(reference) > 5
    for mine, theirs in zip(ours, reference):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
        assert mine.abs().max() > 0


def test_operator_registration(entries):
    q, where, own = entries(coarse=2, spans=1, biased=True)
    leaf = q.clone().requires_grad_()
    torch.library.opcheck(mixed_attention, (leaf, where, *own), {"scale": SCALE})


def test_fake_shapes_follow_queries_and_values(entries):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, where, own = entries(value_dim=9, coarse=2, bits=(8, 4))
    _, _, factored = entries(value_dim=9, spans=1)
    with FakeTensorMode() as mode:

        def fake(x):
            if isinstance(x, list):
                return [fake(part) for part in x]
            return x if x is None else mode.from_tensor(x)

        def shape(own: Entries) -> tuple[int, ...]:
            out = mixed_attention(fake(q), fake(where), *map(fake, own), scale=SCALE)
            assert out.dtype == torch.float64
            return tuple(out.shape)

        assert shape(own) == (2, 4, 3, 9)
        alone = own._replace(**{name: given[1:] for name in BLOCKS if (given := getattr(own, name)) is not None})
        assert shape(alone) == (2, 4, 3, 6)
        assert shape(alone._replace(**{name: getattr(factored, name) for name in FACTORED})) == (2, 4, 3, 9)
