"""Blocks of entries as `semkv::mixed_attention` takes them, and which of them a query head reads."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite
from semkv.runtime.store.quantization import Quantized

NEG_INF = float("-inf")


def bias_of(seen: Tensor, device: torch.device) -> Tensor:
    """float32 on `device`: 0 where `seen`, else -inf."""
    bias = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
    return bias.masked_fill_(~seen, NEG_INF).to(device)


def with_block(
    entries: Entries, k: Tensor | Quantized, v: Tensor | Quantized, positions: Tensor, bias: Tensor | None
) -> Entries:
    """`entries` and one more block of them."""
    before = len(entries.block_k)

    def more(given: list[Tensor | None] | None, x: Tensor | None) -> list[Tensor | None] | None:
        return given if given is None and x is None else [*(given or [None] * before), x]

    (k, k_scale), (v, v_scale) = ((x.codes, x.scale) if isinstance(x, Quantized) else (x, None) for x in (k, v))
    return entries._replace(
        block_k=[*entries.block_k, k],
        block_v=[*entries.block_v, v],
        block_positions=[*entries.block_positions, positions],
        block_bias=more(entries.block_bias, bias),
        block_k_scale=more(entries.block_k_scale, k_scale),
        block_v_scale=more(entries.block_v_scale, v_scale),
    )


def zoomed_units(zoom: Tensor, unit: Tensor, site: AttentionSite) -> Tensor:
    """zoom bool [Hq, T, M], unit int64 [Hkv, s] (-1 pads) -> bool [Hq, T, s]: which gathered places each head reads."""
    index = unit.clamp(min=0).repeat_interleave(site.group_size, 0)[:, None].expand(-1, zoom.shape[1], -1)
    return zoom.gather(2, index) & (unit >= 0).repeat_interleave(site.group_size, 0)[:, None]
