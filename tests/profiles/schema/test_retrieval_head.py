"""The retrieval head's section: sizes, YaRN against a loop, heads of one number served to heads of another."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from semkv.profiles.schema.retrieval_head import RetrievalHeadSection, Yarn, matched_heads, rotary_frequencies

SIZES = {
    "hidden": 12,
    "feature_sites": (1, 3),
    "features": 24,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "parameters": 900,
    "whole": 10_000,
}


def section(**changes) -> RetrievalHeadSection:
    return RetrievalHeadSection(**(SIZES | changes))


def test_tensors_follow_from_the_sizes():
    assert section().tensor_shapes() == {
        "retrieval_head.input_norm": (12,),
        "retrieval_head.query": (24, 36),
        "retrieval_head.key": (12, 36),
        "retrieval_head.feature_norm": (24,),
    }
    projected = section(projected=12).tensor_shapes()
    assert projected["retrieval_head.projection"] == (12, 24)
    assert projected["retrieval_head.query"] == (24, 24)
    assert projected["retrieval_head.feature_norm"] == (12,)
    plain = section(feature_sites=(), features=0)
    assert set(plain.tensor_shapes()) == {f"retrieval_head.{name}" for name in ("input_norm", "query", "key")}
    assert plain.inputs == 12
    assert section().key_nbytes == 2 * 2 * 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_heads": 3}, "3 query heads are no multiple of 2 KV heads"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"features": 0}, "do not agree"),
        ({"feature_sites": (), "features": 0, "projected": 4}, "do not agree"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        section(**changes)


def test_yarn_against_a_loop():
    """Peng et al. (2023), Sec. 3.2: pairs by how often they turn within the trained length."""
    dim, theta, factor, length = 64, 10_000.0, 8.0, 2048
    made, scale = rotary_frequencies(
        section(head_dim=dim, theta=theta, yarn=Yarn(factor=factor, positions=length, fast=32, slow=1))
    )
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        turns = length * plain / (2 * math.pi)
        ramp = min(1.0, max(0.0, (turns - 1) / (32 - 1)))
        assert made[pair].item() == pytest.approx((1 - ramp) * plain / factor + ramp * plain, rel=1e-6)
    assert made[0].item() == pytest.approx(1.0)
    assert made[-1].item() == pytest.approx(theta ** (-62 / 64) / factor, rel=1e-6)
    assert scale == pytest.approx((0.1 * math.log(8) + 1) ** 2)


def test_without_extension_frequencies_are_plain():
    made, scale = rotary_frequencies(section(head_dim=8, theta=100.0))
    torch.testing.assert_close(made, torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]))
    assert scale == 1.0


def test_heads_of_one_number_serve_another():
    weights = torch.tensor([[1.0, 5.0], [4.0, 2.0]])
    assert torch.equal(matched_heads(weights, 2), weights)
    assert matched_heads(weights, 4).tolist() == [[1, 5], [1, 5], [4, 2], [4, 2]]  # multi-head
    assert matched_heads(weights, 1).tolist() == [[4, 5]]  # multi-query, and latents that all heads share
    assert matched_heads(weights, 3).tolist() == [[4, 5]] * 3
