"""`semkv::mixed_attention`: the blocked implementation against the reference that rebuilds everything."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import semkv.kernels.mixed_attention.blocked as blocked
import semkv.kernels.mixed_attention.streaming as streaming
from semkv.errors import InputError
from semkv.ir.memory import Entries
from semkv.ir.ops import mixed_attention
from semkv.kernels.mixed_attention import FLOAT_ARGUMENTS, mixed_attention_blocked, mixed_attention_reference

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
}
TERMS = ("sinks", "slopes", "table", "softcap", "window")


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
    """The same entries, the exact ones in blocks that end at `edges`."""
    exact = own.exact_k[0].shape[2]
    ends = [0, *(edge for edge in edges if edge < exact), exact]

    def cut(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        return [x.narrow(dim, start, end - start) for start, end in pairwise(ends)]

    return own._replace(
        exact_k=cut(own.exact_k[0], 2), exact_v=cut(own.exact_v[0], 2), exact_positions=cut(own.exact_positions[0], 2),
        exact_bias=None if own.exact_bias is None else cut(own.exact_bias[0], 3),
    )  # fmt: skip


@pytest.mark.parametrize("terms", [(), ("sinks", "slopes", "softcap"), ("table", "window")])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_are_one_list_of_entries(entries, name, terms):
    """Wherever the exact entries are cut, and with a bias for some blocks only: the reference with one block."""
    q, where, own = entries(**SHAPES[name])
    options = extras(q.shape[1], terms)
    expected = mixed_attention_reference(q, where, *own, **options)
    for edges in ((1,), (2, 2, 40), (0, 4)):
        for function in (mixed_attention_reference, mixed_attention_blocked):
            got = function(q, where, *divided(own, edges), **options)
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    if own.exact_bias is not None:
        own.exact_bias[0][..., :1] = 0
        expected = mixed_attention_reference(q, where, *own, **options)
        some = divided(own, (1,))
        some = some._replace(exact_bias=[None, some.exact_bias[1]])
        torch.testing.assert_close(mixed_attention(q, where, *some, **options), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("terms", [(), TERMS[:-1]])
def test_blocks_may_be_of_some_rows_and_heads(entries, tokens, terms):
    """Ragged heads without padding: each place (row, KV head) alone gives the same output."""
    q, where, own = entries(batch=2, tokens=tokens, q_heads=6, kv_heads=3, exact=70, coarse=4, spans=2, biased=True)
    options = extras(6, terms)
    k, v, positions, bias = own.exact_k[0], own.exact_v[0], own.exact_positions[0], own.exact_bias[0]
    cuts = [
        ((0, 0, 3), 0, 9),
        ((0, 0, 2), 9, 30),
        ((0, 2, 3), 9, 11),
        ((1, 0, 1), 0, 70),
        ((1, 1, 3), 5, 5),
        ((1, 1, 3), 60, 70),
    ]
    parts = [
        (k[row, a:b], v[row, a:b], positions[row, a:b], bias[row, 2 * a : 2 * b], (i, j)) for (row, a, b), i, j in cuts
    ]
    ragged = own._replace(
        exact_k=[x[None, :, i:j] for x, _, _, _, (i, j) in parts],
        exact_v=[x[None, :, i:j] for _, x, _, _, (i, j) in parts],
        exact_positions=[x[None, :, i:j] for _, _, x, _, (i, j) in parts],
        exact_bias=[x[None, ..., i:j] for _, _, _, x, (i, j) in parts],
        exact_heads=[3 * row + a for (row, a, _), _, _ in cuts],
    )
    got = mixed_attention(q, where, *ragged, **options)
    torch.testing.assert_close(mixed_attention_reference(q, where, *ragged, **options), got, rtol=1e-10, atol=1e-12)
    for row in range(2):
        for head in range(3):
            here = [(i, j) for (r, a, b), i, j in cuts if r == row and a <= head < b]
            seen = torch.cat([torch.arange(i, j) for i, j in here])
            one = Entries(*(None if x is None or isinstance(x, list) else x[row : row + 1] for x in own))
            one = Entries(
                [k[row, head][None, None, seen]], [v[row, head][None, None, seen]], [positions[row, head][None, None, seen]],
                [bias[row, 2 * head : 2 * head + 2][None, ..., seen]], None, one.coarse_k[:, [head]], one.coarse_v[:, [head]],
                one.coarse_positions, one.coarse_bias, *(x[:, [head]] for x in one[9:16]), one.factored_bias[:, 2 * head : 2 * head + 2],
            )  # fmt: skip
            own_options = {
                name: x[2 * head : 2 * head + 2] if isinstance(x, torch.Tensor) else x for name, x in options.items()
            }
            alone = mixed_attention_reference(q[row : row + 1, 2 * head : 2 * head + 2], where[:1], *one, **own_options)
            torch.testing.assert_close(got[row, 2 * head : 2 * head + 2], alone[0], rtol=1e-10, atol=1e-12)


def test_blocks_that_do_not_fit_are_refused(entries):
    q, where, own = entries()
    with pytest.raises(InputError, match="1 exact blocks and exact_heads 2 first places; expected at least one block"):
        mixed_attention(q, where, *own._replace(exact_heads=[0, 1]), scale=SCALE)
    with pytest.raises(InputError, match="no exact block has places 0 to 0"):
        mixed_attention(q, where, *(x[:1] if isinstance(x, torch.Tensor) else x for x in own._replace(
            exact_k=[own.exact_k[0][:1, :1]], exact_v=[own.exact_v[0][:1, :1]], exact_positions=[own.exact_positions[0][:1, :1]],
            exact_heads=[1])), scale=SCALE)  # fmt: skip
    with pytest.raises(InputError, match="4 query heads for 3 KV heads of 1 rows; expected a multiple"):
        mixed_attention(
            q[:1], where[:1], *own._replace(exact_k=[own.exact_k[0][:1, :1]] * 1, exact_heads=[2]), scale=SCALE
        )
    leaf = own.exact_k[0].new_zeros(2, 1, 1, 7).requires_grad_()
    pair = divided(own, (3,))._replace(exact_bias=[None, leaf[..., 3:]])
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
        (streaming.scores(q, entries), q, entries.mT), (streaming.weighted_sum(weights, entries), weights, entries),
    ):  # fmt: skip
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
        exact_positions=[where[:, None]], exact_bias=[torch.tensor([0.0, 1.0, 2.0]).expand(2, 1, 1, 3).double()]
    )
    expected = mixed_attention_reference(q, where, *own, scale=SCALE)
    torch.testing.assert_close(mixed_attention_blocked(q, where, *own, scale=SCALE, fresh=True), expected)


def test_one_softmax_over_all_kinds(entries):
    """Factored entries are tokens in another form: rebuilt and given as exact ones they change nothing."""
    q, where, own = entries(coarse=3, spans=2, biased=True)
    keys = ((own.key_u * own.key_s[..., None, :]) @ own.key_v.mT).flatten(2, 3)
    values = ((own.value_u * own.value_s[..., None, :]) @ own.value_v.mT).flatten(2, 3)
    coarse_bias = own.coarse_bias.expand(2, 4, 3, 3)
    k, v = torch.cat((*own.exact_k, own.coarse_k, keys), 2), torch.cat((*own.exact_v, own.coarse_v, values), 2)
    places = torch.cat(
        (*own.exact_positions, own.coarse_positions.expand(-1, 2, -1), own.factored_positions.flatten(2, 3)), 2
    )
    bias = torch.cat((*own.exact_bias, coarse_bias, own.factored_bias.flatten(3, 4)), 3)
    joined = mixed_attention(q, where, [k], [v], [places], [bias], scale=SCALE)
    torch.testing.assert_close(mixed_attention(q, where, *own, scale=SCALE), joined)


def test_absent_and_later_entries_have_no_weight(entries):
    """Whatever finite numbers hidden entries hold, the output is bit for bit the same."""
    q, where, own = entries(exact=9, coarse=4, spans=2, biased=True)
    own.exact_positions[0][:, :, 0] = 99
    own.exact_bias[0][..., 1] = float("-inf")
    gone = torch.zeros(2, 2, 9, dtype=torch.bool)
    gone[..., :2] = True
    expected = mixed_attention(q, where, *own, scale=SCALE)
    k = own.exact_k[0].masked_fill(gone[..., None], 1e3)
    v = own.exact_v[0].masked_fill(gone[..., None], -1e30)
    dropped = own.coarse_bias[:, :, 0, :, None].expand(-1, 2, -1, 6) == float("-inf")
    assert dropped.any()
    changed = own._replace(exact_k=[k], exact_v=[v], coarse_v=own.coarse_v.masked_fill(dropped, 1e30))
    assert torch.equal(mixed_attention(q, where, *changed, scale=SCALE), expected)
    visible = own._replace(exact_v=[own.exact_v[0] + 1.0])
    assert not torch.equal(mixed_attention(q, where, *visible, scale=SCALE), expected)


def test_padding_of_ragged_factors_changes_nothing(entries):
    """Zero rows and ranks, with bias -inf on the rows, are how spans of different sizes share a tensor."""
    q, where, own = entries(spans=2, length=5, rank=3)
    expected = mixed_attention(q, where, *own, scale=SCALE)
    wider = own._replace(
        key_u=F.pad(own.key_u, (0, 2, 0, 4)), value_u=F.pad(own.value_u, (0, 2, 0, 4)),
        key_s=F.pad(own.key_s, (0, 2)), value_s=F.pad(own.value_s, (0, 2)),
        key_v=F.pad(own.key_v, (0, 2)), value_v=F.pad(own.value_v, (0, 2)),
        factored_positions=F.pad(own.factored_positions, (0, 4)),
        factored_bias=F.pad(own.factored_bias, (0, 4), value=float("-inf")),
    )  # fmt: skip
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
    half = own._replace(exact_k=[own.exact_k[0].half()], exact_v=[own.exact_v[0].half()])
    wide = own._replace(exact_k=[half.exact_k[0].double()], exact_v=[half.exact_v[0].double()])
    got = mixed_attention(q, where, *half, scale=SCALE)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, mixed_attention(q, where, *wide, scale=SCALE))


@pytest.mark.parametrize("name", ["odd", "value dim", "multi-query"])
@pytest.mark.parametrize("blocks", [False, True])
def test_gradients_equal_autograd_through_the_reference(entries, name, blocks):
    q, where, own = entries(**SHAPES[name])
    own = divided(own, (3, 5)) if blocks else own
    options = extras(q.shape[1], ("sinks", "slopes", "softcap", "table"))
    keywords = {key: options[key] for key in ("scale", "softcap")}
    arguments = [q, where, *own, *(options[key] for key in ("sinks", "bias_slopes", "bias_table"))]

    def leaf(x):
        if isinstance(x, list):
            return [leaf(part) for part in x]
        return x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x

    def gradients(function) -> list[torch.Tensor | None]:
        leaves = [leaf(x) if place in FLOAT_ARGUMENTS else x for place, x in enumerate(arguments)]
        out = function(*leaves, **keywords)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found = [leaves[place] for place in FLOAT_ARGUMENTS if leaves[place] is not None]
        return [part.grad for x in found for part in (x if isinstance(x, list) else [x])]

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

    q, where, own = entries(value_dim=9, coarse=2)
    with FakeTensorMode() as mode:
        fakes = [
            [mode.from_tensor(part) for part in x]
            if isinstance(x, list)
            else None
            if x is None
            else mode.from_tensor(x)
            for x in (q, where, *own)
        ]
        out = mixed_attention(*fakes, scale=SCALE)
    assert out.shape == (2, 4, 3, 9)
    assert out.dtype == torch.float64
