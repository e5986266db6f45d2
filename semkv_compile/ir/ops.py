"""Schemas and fake implementations of the semkv operators; `semkv.kernels` brings the real ones.

`semkv::attention` is the normal form that `find_attention` writes: stateless, causal, over the tokens of one forward.
`semkv::mixed_attention` is what it becomes: one softmax over blocks of entries and factored spans given as tensors.
`semkv::linear` is what `stream_weights` makes of a projection that few tokens pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

library = torch.library.Library("semkv", "DEF")

library.define(
    # q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], positions [B, T] -> [B, Hq, T, Dv]
    "attention(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor? sinks=None, Tensor? bias_slopes=None, "
    "Tensor? bias_table=None, Tensor? chosen=None, "
    "*, int site, float scale, float softcap=0.0, int window=0, int chunk=0) -> Tensor"
)  # chosen [B, T, n] whole numbers: places of the tokens that each one reads among those before it; below 0: none
# chunk: a token reads those of its own run of so many positions; 0: of all
library.define(
    # shapes: see semkv.ir.memory.Entries; q [B, Hq, T, D], q_positions [B, T] -> [B, Hq, T, Dv]
    "mixed_attention(Tensor q, Tensor q_positions, "
    "Tensor[] block_k, Tensor[] block_v, Tensor[] block_positions, Tensor?[]? block_bias=None, int[]? block_heads=None, "
    "Tensor?[]? block_k_scale=None, Tensor?[]? block_v_scale=None, "
    "Tensor? key_u=None, Tensor? key_s=None, Tensor? key_v=None, "
    "Tensor? value_u=None, Tensor? value_s=None, Tensor? value_v=None, "
    "Tensor? factored_positions=None, Tensor? factored_bias=None, "
    "Tensor? sinks=None, Tensor? bias_slopes=None, Tensor? bias_table=None, "
    # kernel: auto, torch, cpp or triton; layout: see semkv.kernels.mixed_attention.configuration
    "*, float scale, float softcap=0.0, int window=0, bool fresh=False, str kernel='auto', int[] layout=[]) -> Tensor"
)

library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"
)  # x [..., K], weight [N, K], bias [N] -> [..., N]


def value_dim(
    q: Tensor, block_v: Sequence[Tensor], block_v_scale: Sequence[Tensor | None] | None, value_v: Tensor | None = None
) -> int:
    """Dv, the last size of the output: that of the first block whose values are plain numbers, which may be empty, else that of the
    factors. Where all values are codes, whose width leaves it open by one, that of the queries."""
    scales = [None] * len(block_v) if block_v_scale is None else block_v_scale
    plain = [v for v, scale in zip(block_v, scales) if scale is None]
    if plain:
        return plain[0].shape[-1]
    return q.shape[-1] if value_v is None else value_v.shape[-2]


@torch.library.register_fake("semkv::attention", lib=library)
def _attention_fake(
    q,
    k,
    v,
    positions,
    sinks=None,
    bias_slopes=None,
    bias_table=None,
    chosen=None,
    *,
    site,
    scale,
    softcap=0.0,
    window=0,
    chunk=0,
):
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@torch.library.register_fake("semkv::mixed_attention", lib=library)
def _mixed_attention_fake(
    q,
    q_positions,
    block_k,
    block_v,
    block_positions,
    block_bias=None,
    block_heads=None,
    block_k_scale=None,
    block_v_scale=None,
    key_u=None,
    key_s=None,
    key_v=None,
    value_u=None,
    value_s=None,
    value_v=None,
    *rest,
    **kwargs,
):
    return q.new_empty((*q.shape[:-1], value_dim(q, block_v, block_v_scale, value_v)))


@torch.library.register_fake("semkv::linear", lib=library)
def _linear_fake(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


attention = torch.ops.semkv.attention.default
mixed_attention = torch.ops.semkv.mixed_attention.default
linear = torch.ops.semkv.linear.default
