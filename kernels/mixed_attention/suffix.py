"""Attention of a prompt's chunk: queries of the newest tokens on all tokens so far, without a matrix of scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

HALF = (torch.float16, torch.bfloat16)


def is_suffix(q: Tensor, q_positions: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> bool:
    """Whether `suffix_attention` computes what is asked for: the queries' tokens are the last of all, in order, after all others.

    q [B, Hq, T, D], q_positions [B, T], k [B, Hkv, N, D], v [B, Hkv, N, Dv], positions [B, Hkv|1, N]. Waits for the device.
    """
    tokens, entries = q.shape[2], k.shape[2]
    if tokens < 2 or tokens > entries or positions.shape[1] != 1 or not q.dtype == k.dtype == v.dtype:
        return False
    if k.shape[3] != v.shape[3]:
        return False
    own, before = positions[:, 0, entries - tokens :], positions[:, 0, : entries - tokens]
    in_order = torch.equal(own, q_positions.to(own.dtype)) and bool((own[:, 1:] > own[:, :-1]).all())
    return in_order and (tokens == entries or bool((before.amax(1) < own[:, 0]).all()))


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Keys, values and whether PyTorch's attention has to share their heads. On a device other than the CPU it does so without all scores
    in memory only in half precision; in other dtypes heads are repeated for it."""
    if q.device.type == "cpu" or q.dtype in HALF or q.shape[1] == k.shape[1]:
        return k, v, True
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return k, v, False


def suffix_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal softmax attention of T queries whose tokens are the last of N.

    q [B, Hq, T, D], k, v [B, Hkv, N, D] -> [B, Hq, T, D]. On a CPU the queries' own tokens and those before them are attended to
    apart and joined by their log-sum-exps: keys and values of earlier tokens are read where they are, never copied or repeated.
    """
    if q.device.type != "cpu":
        k, v, shared = shared_heads(q, k, v)
        bias = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=shared)
    past = k.shape[2] - q.shape[2]
    group = q.shape[1] // k.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own_k, own_v = (x[:, :, past:].repeat_interleave(group, 1) for x in (k, v))
    out, lse = flash(q, own_k, own_v, is_causal=True, scale=scale)
    if not past:
        return out
    packed = q.reshape(q.shape[0], k.shape[1], group * q.shape[2], q.shape[3])  # heads of a group see the same entries
    before, before_lse = flash(packed, k[:, :, :past], v[:, :, :past], scale=scale)
    share = torch.sigmoid(before_lse.reshape(lse.shape) - lse)[..., None]
    own, before = (
        out.to(share.dtype),
        before.reshape(out.shape).to(share.dtype),
    )  # halves are rounded once more, not twice
    return torch.lerp(own, before, share).to(q.dtype)
