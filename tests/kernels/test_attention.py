"""`semkv::attention`: stateless causal attention in the normal form."""

from __future__ import annotations

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
    expected = mixed_attention_reference(q, where, k, v, where[:, None], scale=0.3, **options)
    torch.testing.assert_close(attention(q, k, v, where, site=1, scale=0.3, **options), expected)


def test_operator_registration():
    q, k, v, where = operands()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(attention, (*leaves, where, torch.zeros(4).double()), {"site": 0, "scale": 0.3, "window": 5})


def test_gradients_reach_what_is_learned():
    q, k, v, where = operands()
    sinks, slopes = torch.zeros(4, dtype=torch.float64), torch.full((4,), 0.1, dtype=torch.float64)
    learned = [x.requires_grad_() for x in (q, k, v, sinks, slopes)]
    attention(q, k, v, where, sinks, slopes, site=0, scale=0.3).square().sum().backward()
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in learned)
