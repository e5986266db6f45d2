"""`semkv::attention`: stateless causal attention in the normal form."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import semkv.kernels  # noqa: F401  registers the operators
from semkv.ir.ops import attention
from semkv.kernels.mixed_attention import mixed_attention_reference


def operands(value_dim: int = 6) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    where = torch.arange(11).expand(2, -1) + torch.tensor([[0], [5]])
    shapes = ((2, 4, 11, 6), (2, 2, 11, 6), (2, 2, 11, value_dim))
    return (*(torch.randn(*shape, dtype=torch.float64) for shape in shapes), where)


def test_equals_plain_causal_attention():
    q, k, v, where = operands()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, where, site=0, scale=0.3), expected)


@pytest.mark.parametrize("options", [{"window": 4}, {"softcap": 1.5}, {"window": 3, "softcap": 2.0}])
def test_equals_the_reference_with_gaps_in_the_positions(options):
    q, k, v, where = operands(value_dim=9)
    where = where + torch.tensor([0, 0, 0, 4, 4, 4, 4, 9, 9, 9, 9])
    expected = mixed_attention_reference(q, where, [k], [v], [where[:, None]], scale=0.3, **options)
    torch.testing.assert_close(attention(q, k, v, where, site=1, scale=0.3, **options), expected)


def test_operator_registration():
    q, k, v, where = operands()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(attention, (*leaves, where, torch.zeros(4).double()), {"site": 0, "scale": 0.3, "window": 5})


def by_loops(q, k, v, where, sinks=None, slopes=None, *, scale, window=0, softcap=0.0):
    """One query and one key at a time: the definition."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for row, head, t in itertools.product(*map(range, q.shape[:3])):
        kv, logits, values = head // (q.shape[1] // k.shape[1]), [], []
        for other in range(k.shape[2]):
            distance = where[row, t] - where[row, other]
            if distance < 0 or (window and distance >= window):
                continue
            logit = scale * q[row, head, t] @ k[row, kv, other]
            logit = softcap * torch.tanh(logit / softcap) if softcap else logit
            logits.append(logit if slopes is None else logit - slopes[head] * distance)
            values.append(v[row, kv, other])
        weights = torch.stack(logits if sinks is None else [*logits, sinks[head]]).softmax(0)
        out[row, head, t] = sum(weight * value for weight, value in zip(weights, values))
    return out


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 1.5}])
def test_sinks_slopes_and_gradients_are_those_of_the_definition(options):
    q, k, v, where = operands(value_dim=5)
    sinks, slopes = torch.linspace(-1, 1, 4).double(), torch.full((4,), 0.1, dtype=torch.float64)
    learned = [x.requires_grad_() for x in (q, k, v, sinks, slopes)]
    got = attention(q, k, v, where, sinks, slopes, site=0, scale=0.3, **options)
    expected = by_loops(q, k, v, where, sinks, slopes, scale=0.3, **options)
    torch.testing.assert_close(got, expected)
    weights = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((got * weights).sum(), learned)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), learned)):
        torch.testing.assert_close(one, other)


def test_a_later_token_changes_nothing():
    q, k, v, where = operands()
    before = attention(q, k, v, where, site=0, scale=0.3)
    k[:, :, 7:], v[:, :, 7:] = 100.0, 100.0
    after = attention(q, k, v, where, site=0, scale=0.3)
    assert torch.equal(after[:, :, :7], before[:, :, :7])
    assert not torch.isclose(after[:, :, 7:], before[:, :, 7:]).any()
