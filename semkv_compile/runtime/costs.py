"""What one folded unit and one token take, in bytes."""

from __future__ import annotations

import torch

from semkv.ir.site import AttentionSite
from semkv.runtime.components import Components
from semkv.runtime.quantization import bytes_per_vector


def unit_cost_bytes(site: AttentionSite, components: Components, dtype: torch.dtype) -> float:
    """Device bytes that stay for one folded unit, per KV head, with keys and values in `dtype`."""
    summary, router = components.summary, components.router
    cost = 0.0
    if summary is not None:
        cost += bytes_per_vector(site.key_dim, summary.bits, dtype) + 8 / site.kv_heads
        cost += bytes_per_vector(site.value_dim, summary.bits, dtype) if summary.attend else 0
    if router is not None and components.unfold:
        parts = router.index(site, summary)
        cost += sum(part.unit_nbytes for part in parts.values()) / site.kv_heads
    return cost


def exact_nbytes(site: AttentionSite, components: Components, dtype: torch.dtype) -> int:
    """Device bytes of an exact token's key and value in one KV head."""
    if components.exact_form == "int8":
        return bytes_per_vector(site.key_dim, 8) + bytes_per_vector(site.value_dim, 8)
    return (site.key_dim + site.value_dim) * dtype.itemsize


def waiting_cost_bytes(site: AttentionSite, components: Components, dtype: torch.dtype) -> int:
    """Bytes that one folded token takes while it waits, over the heads of `site`; factors take no more than that."""
    if components.segmenter is None or components.host_form == "none":
        return 0
    if components.host_form == "raw":
        return site.values_per_token * dtype.itemsize
    return site.kv_heads * (bytes_per_vector(site.key_dim, 8) + bytes_per_vector(site.value_dim, 8))
