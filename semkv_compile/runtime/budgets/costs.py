"""What one folded unit and one token take, in bytes."""

from __future__ import annotations

import math

import torch

from semkv.ir.site import AttentionSite
from semkv.runtime.components import Components, Form
from semkv.runtime.store.quantization import CODE_BITS, bytes_per_vector


def unit_cost_bytes(site: AttentionSite, components: Components, dtype: torch.dtype) -> float:
    """Device bytes that stay for one folded unit, per KV head, with keys and values in `dtype`."""
    summary, router = components.summary, components.router
    cost = 0.0
    if summary is not None:
        cost += bytes_per_vector(site.key_dim, summary.bits, dtype) + 8 * site.once / site.kv_heads
        cost += bytes_per_vector(site.value_dim, summary.bits, dtype) if summary.attend else 0
    if router is not None and components.unfold:
        parts = router.index(site, summary)
        cost += sum(part.unit_nbytes for part in parts.values()) / site.kv_heads
    return cost


def form_of(components: Components, *, kept: bool = False) -> Form:
    """In which form exact tokens are held, those that stay for good where `kept`."""
    return components.kept_form or components.exact_form if kept else components.exact_form


def exact_nbytes(site: AttentionSite, components: Components, dtype: torch.dtype, *, kept: bool = False) -> int:
    """Device bytes of an exact token's key and value in one KV head, of one that stays for good where `kept`."""
    return token_nbytes(site, form_of(components, kept=kept), dtype)


def exact_nbytes_of(site: AttentionSite, components: Components, tokens: int, page: int, dtype: torch.dtype) -> int:
    """Device bytes of a row of `tokens` exact tokens, in pages of `page`; first ones may take a page of their own."""
    each, first = (
        exact_nbytes(site, components, dtype, kept=kept) * site.kv_heads + 4 * site.once for kept in (False, True)
    )
    return math.ceil(-(-tokens // page) * page * each + page * first)


def token_nbytes(site: AttentionSite, form: Form, dtype: torch.dtype) -> int:
    """Bytes of one token's key and value in one KV head in a form of `Components`."""
    bits = CODE_BITS.get(form, 16)
    return sum(int(bytes_per_vector(dim, bits, dtype)) for dim in (site.key_dim, site.value_dim))


def waiting_cost_bytes(site: AttentionSite, components: Components, dtype: torch.dtype) -> int:
    """Bytes that one folded token takes while it waits, over the heads of `site`; factors take no more than that."""
    if components.segmenter is None or components.host_form == "none":
        return 0
    return site.kv_heads * token_nbytes(site, components.host_form, dtype)
