"""Attention of a prompt's chunk against the operator's reference."""

from __future__ import annotations

import pytest
import torch

from semkv.kernels.mixed_attention import blocked, mixed_attention_blocked, mixed_attention_reference
from semkv.kernels.mixed_attention.suffix import is_suffix, shared_heads, suffix_attention

SHAPES = [(1, 4, 2, 7, 30, 8), (2, 6, 2, 5, 5, 60), (1, 4, 4, 63, 174, 64), (1, 8, 2, 2, 111, 16)]
"""B, Hq, Hkv, T, N, D."""


def inputs(shape, dtype):
    """Queries and positions; keys and values are parts of longer buffers whose rest is NaN, as a record's are."""
    torch.manual_seed(0)
    b, hq, hkv, t, n, d = shape
    k, v = torch.full((2, b, hkv, n + 9, d), float("nan"), dtype=dtype)
    k[:, :, :n], v[:, :, :n] = torch.randn(2, b, hkv, n, d)
    q = torch.randn(b, t, hq, d).to(dtype).transpose(1, 2)
    positions = 3 + torch.arange(n).expand(b, 1, n)
    return q, positions[:, 0, n - t :], k[:, :, :n], v[:, :, :n], positions


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_error_is_that_of_a_plain_softmax(shape, dtype):
    """Against float64: at most twice the error of PyTorch's attention with a mask in the same dtype."""
    q, q_positions, k, v, positions = inputs(shape, dtype)
    assert is_suffix(q, q_positions, k, v, positions)
    expected = mixed_attention_reference(q.double(), q_positions, [k.double()], [v.double()], [positions], scale=0.3)
    with torch.no_grad():
        got = mixed_attention_blocked(q, q_positions, [k], [v], [positions], scale=0.3)
    seen = positions[:, :, None] <= q_positions[:, None, :, None]
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    assert (got - expected).abs().max() <= 2 * (plain - expected).abs().max() + 1e-14
    assert got.dtype == dtype


@pytest.mark.parametrize(
    ("device", "dtype", "kv_heads", "repeated"),
    [
        ("cpu", torch.float32, 2, False),
        ("meta", torch.bfloat16, 2, False),
        ("meta", torch.float32, 6, False),
        ("meta", torch.float32, 2, True),
    ],
)
def test_heads_are_repeated_where_pytorch_would_hold_all_scores(device, dtype, kv_heads, repeated):
    q, k = (torch.empty(1, heads, 5, 8, dtype=dtype, device=device) for heads in (6, kv_heads))
    given, values, shared = shared_heads(q, k, k[..., :4])
    assert shared is not repeated
    assert (given.shape[1], values.shape) == (6, (1, 6, 5, 4)) if repeated else given is k


def test_it_is_what_the_operator_runs_in_pytorch(monkeypatch):
    calls = []
    monkeypatch.setattr(blocked, "suffix_attention", lambda *args: calls.append(args) or suffix_attention(*args))
    q, q_positions, k, v, positions = inputs(SHAPES[0], torch.float32)
    with torch.no_grad():
        torch.ops.semkv.mixed_attention(q, q_positions, [k], [v], [positions], scale=0.3, kernel="torch")
    assert len(calls) == 1
    q.requires_grad_()
    out = torch.ops.semkv.mixed_attention(q, q_positions, [k], [v], [positions], scale=0.3, kernel="torch")
    gradient = torch.autograd.grad(out.square().sum(), q)[0]
    naive = mixed_attention_reference(q, q_positions, [k], [v], [positions], scale=0.3)
    torch.testing.assert_close(gradient, torch.autograd.grad(naive.square().sum(), q)[0], rtol=1e-3, atol=1e-4)


def test_other_layouts_are_not_taken_for_a_suffix():
    q, q_positions, k, v, positions = inputs(SHAPES[0], torch.float32)
    shuffled = positions[..., torch.randperm(30)]
    late = positions.clone()
    late[..., 0] = 40  # an entry before the queries' own that they must not see
    for where, asked in ((shuffled, q_positions), (late, q_positions), (positions, q_positions - 1)):
        assert not is_suffix(q, asked, k, v, where)
        with torch.no_grad():
            got = mixed_attention_blocked(q, asked, [k], [v], [where], scale=0.3)
        torch.testing.assert_close(
            got, mixed_attention_reference(q, asked, [k], [v], [where], scale=0.3), rtol=1e-4, atol=1e-5
        )
    assert not is_suffix(q, q_positions, k, v[..., :4], positions)
    assert not is_suffix(q, q_positions, k.double(), v, positions)
    assert not is_suffix(q[:, :, -1:], q_positions[:, -1:], k, v, positions)
