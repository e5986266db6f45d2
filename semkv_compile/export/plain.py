"""The operators of a decode step in PyTorch's own: what other runtimes have operators for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from semkv.ir import ops
from semkv.ir.ops import value_dim
from semkv.kernels.state import REFERENCES
from semkv.kernels.state.reference import products_reference, unpacked

NONE = float("-inf")


def attend_blocks(
    q: Tensor,
    q_positions: Tensor,
    block_k: Sequence[Tensor],
    block_v: Sequence[Tensor],
    block_positions: Sequence[Tensor],
    block_bias: Sequence[Tensor | None] | None = None,
    block_heads: Sequence[int] | None = None,
    block_k_scale: Sequence[Tensor | None] | None = None,
    block_v_scale: Sequence[Tensor | None] | None = None,
    *,
    sinks: Tensor | None = None,
    bias_slopes: Tensor | None = None,
    bias_table: Tensor | None = None,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    **settings: object,
) -> Tensor:
    """`semkv::mixed_attention` of one token of each row, over blocks of all rows and heads, without factored spans.

    q [B, Hq, 1, D], q_positions int64 [B, 1]; blocks and terms as in `semkv.ir.memory.Entries` -> [B, Hq, 1, Dv] in the dtype of q. Scores
    and sums are float32.
    """
    assert block_heads is None, "blocks of some heads only"
    kv_heads, q_heads = block_k[0].shape[1], q.shape[1]
    sizes = (kv_heads, q_heads // kv_heads)
    asked = (q.float() * scale).view(-1, *sizes, q.shape[3])
    at = q_positions.view(-1, 1, 1, 1)
    count = len(block_k)
    columns = (block_bias or [None] * count, block_k_scale or [None] * count, block_v_scale or [None] * count)
    dim = value_dim(q, block_v, block_v_scale)
    logits, values = [], []
    for k, v, positions, bias, k_scale, v_scale in zip(block_k, block_v, block_positions, *columns):
        score = products_reference(asked, k, k_scale, _bits(k, k_scale, q.shape[3]))
        score = softcap * torch.tanh(score / softcap) if softcap else score
        distance = at - positions[:, :, None].long()
        if bias_slopes is not None:
            score = score - bias_slopes.float().view(*sizes, 1) * distance
        if bias_table is not None:
            table = bias_table.float().view(*sizes, -1)
            index = distance.clamp(0, table.shape[-1] - 1).expand_as(score)
            score = score + table.expand(q.shape[0], -1, -1, -1).gather(-1, index)
        if bias is not None:
            score = score + (bias if bias.shape[1] == 1 else bias.view(-1, *sizes, bias.shape[-1]))
        hidden = distance < 0
        hidden = hidden | (distance >= window) if window else hidden
        logits.append(score.masked_fill(hidden, NONE))
        values.append(v.float() if v_scale is None else unpacked(v, _bits(v, v_scale, dim), dim) * v_scale.float())
    most = logits[0].amax(-1, keepdim=True)
    for score in logits[1:]:
        most = torch.maximum(most, score.amax(-1, keepdim=True))
    mass = None
    if sinks is not None:
        own = sinks.float().view(*sizes, 1)
        most = torch.maximum(most, own)
        mass = (own - most).exp()
    out = None
    for score, value in zip(logits, values):
        weights = (score - most).exp()
        total, sums = weights.sum(-1, keepdim=True), weights @ value
        mass = total if mass is None else mass + total
        out = sums if out is None else out + sums
    assert out is not None
    assert mass is not None
    return (out / mass).view(-1, q_heads, 1, out.shape[-1]).to(q.dtype)


def _bits(x: Tensor, scale: Tensor | None, dim: int) -> int:
    return 16 if scale is None else 8 if x.shape[-1] == dim else 4


def _number_within(bounds: Tensor, places: Tensor, *, right: bool = False) -> Tensor:
    """`torch.searchsorted` of places [..., n] in bounds [..., m], in words that there are everywhere."""
    there = bounds[..., None, :] <= places[..., None] if right else bounds[..., None, :] < places[..., None]
    return there.sum(-1)


def experts_products(x: Tensor, weight: Tensor, ends: Tensor, *rest: object) -> Tensor:
    """Products of rows with their expert's matrix: x [S, K] in the order of experts, of which expert e has those before ends[e] (int [E])
    that no earlier one has, weight [E, K, N] -> [S, N]. Each row reads a matrix of its own, of which a step has few."""
    row = torch.ones_like(x[:, 0], dtype=torch.int64).cumsum(0) - 1
    expert = (row[:, None] >= ends[None]).sum(-1)
    found = (x[:, None] @ weight[expert.clamp(max=weight.shape[0] - 1)])[:, 0]
    return torch.where((expert < weight.shape[0])[:, None], found, 0.0)


PLAIN: Mapping[Any, Callable[..., Any]] = {
    **{getattr(torch.ops.semkv, name).default: reference for name, reference in REFERENCES.items()},
    ops.mixed_attention: attend_blocks,
    ops.linear: F.linear,
    torch.searchsorted: _number_within,
}
"""By what a step calls, what it is made of."""

BY_NAME: Mapping[str, Callable[..., Any]] = {
    "transformers.grouped_mm_fallback.default": experts_products,
    "aten._grouped_mm.default": experts_products,
}
"""Likewise, of operators that exist where their package was imported."""


class InPlainOperators(TorchFunctionMode):
    """While it is entered, what this thread calls of `PLAIN` and `BY_NAME` is computed by what it is made of."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = PLAIN.get(func) or (BY_NAME.get(str(func)) if isinstance(func, OpOverload) else None)
        return (func if made is None else made)(*args, **(kwargs or {}))


__all__ = ["InPlainOperators", "attend_blocks"]
