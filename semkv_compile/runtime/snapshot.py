"""One row's memory as named tensors and plain facts, and back, with every size and index checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semkv.runtime.quantization import Quantized
from semkv.runtime.row_memory import Placement, RowMemory, Traffic
from semkv.runtime.site_memory import SiteMemory
from semkv.runtime.spans import FACTORS, FoldedSpans
from semkv.runtime.token_store import TokenStore

TABLES = ("segment_unit", "segment_kind", "segment_length", "segment_position", "segment_start")


def row_to_tensors(row: RowMemory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(facts, tensors) from which `row_from_tensors` makes an equal row. Traffic is not kept."""
    facts: dict[str, Any] = {"tokens": row.tokens, "stores": sorted(row.stores), "folded": []}
    tensors: dict[str, Tensor] = {}
    for store, memory in row.stores.items():
        own = {f"kept.{name}": x for name, x in memory.kept.to_tensors().items()}
        own |= {f"recent.{name}": x for name, x in memory.recent.to_tensors().items()}
        own["recent_surprisal"] = memory.recent_surprisal
        if memory.spans is not None:
            facts["folded"].append(store)
            own |= _span_tensors(memory.spans)
        tensors |= {f"{store}.{name}": x.contiguous() for name, x in own.items()}
    return facts, tensors


def _span_tensors(spans: FoldedSpans) -> dict[str, Tensor]:
    out = {name: getattr(spans, name) for name in (*TABLES, "lengths", "positions")}
    for name in ("mean_k", "mean_v", "vectors"):
        packed = getattr(spans, name)
        if packed is not None:
            out |= {f"{name}.codes": packed.codes, f"{name}.scale": packed.scale}
    if spans.norms is not None:
        out["norms"] = spans.norms
    out |= {f"tokens.{name}": part.data for name, part in spans.host_tokens.parts.items()}
    factors = spans.host_factors
    if factors.spans:
        out |= {f"factors.{kind}": part.data for kind, part in factors.packed.items()}
        out |= {f"factors.{kind}.offsets": offsets for kind, offsets in factors.offsets.items()}
        out |= {
            "factors.key_rank": factors.key_rank,
            "factors.value_rank": factors.value_rank,
            "factors.lengths": factors.lengths,
        }
    return out


def row_from_tensors(placement: Placement, facts: dict[str, Any], tensors: dict[str, Tensor]) -> RowMemory:
    """The row that `row_to_tensors` described; `ValueError` or `KeyError` where facts and tensors do not fit `placement`."""
    row = object.__new__(RowMemory)
    row.placement, row.traffic = placement, Traffic()
    row.tokens = facts["tokens"]
    stores = {store.store: store for store in placement.program.stores}
    if not isinstance(row.tokens, int) or row.tokens < 1 or facts["stores"] != sorted(stores):
        raise ValueError(f"{row.tokens!r} tokens in stores {facts['stores']!r}, expected stores {sorted(stores)}")
    row.stores = {}
    for number, site in stores.items():
        own = {name.split(".", 1)[1]: x for name, x in tensors.items() if name.startswith(f"{number}.")}
        uncapped = site.treatment != "method" or placement.budget.value is None
        heads, dtype, device = site.kv_heads, placement.budget.dtype, placement.device
        parts = {}
        for part in ("kept", "recent"):
            k, v, positions = (own[f"{part}.{name}"] for name in ("k", "v", "positions"))
            n = k.shape[1] if k.dim() == 3 else -1
            _expect(k, f"{part}.k", (heads, n, site.key_dim), dtype)
            _expect(v, f"{part}.v", (heads, n, site.value_dim), dtype)
            _expect(positions, f"{part}.positions", (positions.shape[0], n), torch.int32)
            if positions.shape[0] not in (1, heads) or not _within(positions, 0, row.tokens):
                raise ValueError(f"{part}.positions are not positions of {row.tokens} tokens in {heads} heads")
            reserve = uncapped and part == "recent"
            parts[part] = TokenStore(
                k.to(device), v.to(device), positions.to(device), placement.page_size, reserve=reserve
            )
        surprisal = _expect(
            own["recent_surprisal"], "recent_surprisal", (parts["recent"].length,), torch.float32
        ).clone()
        spans = None
        if number in facts["folded"]:
            spans = FoldedSpans(site, placement.components, dtype, disk=placement.disk)
            _fill_spans(spans, own, row.tokens)
        components = placement.components
        row.stores[number] = SiteMemory(
            site, components, parts["kept"], parts["recent"], spans, surprisal,
            device=device, elastic=placement.residency == "elastic",
        )  # fmt: skip
    return row


def _fill_spans(spans: FoldedSpans, own: dict[str, Tensor], tokens: int) -> None:
    site, summary = spans.site, spans.components.summary
    if summary is None:
        raise ValueError("folded spans for a method without summaries")
    heads, m = site.kv_heads, len(own["lengths"])
    segments = len(own["segment_unit"])
    stored = own["tokens.k"].shape[1]
    _expect(own["lengths"], "lengths", (m,), torch.int32)
    _expect(own["positions"], "positions", (m,), torch.int32)
    for name in TABLES:
        setattr(spans, name, _expect(own[name], name, (segments,), torch.int64).clone())
    factored = own["factors.lengths"] if "factors.lengths" in own else torch.zeros(0, dtype=torch.int64)
    starts = own["segment_start"]
    is_factor = own["segment_kind"] == FACTORS
    sound = (
        _within(own["lengths"], 1, tokens + 1) and _within(own["positions"], 0, tokens)
        and _within(own["segment_unit"], -1, m)
        and _within(own["segment_kind"], 0, 2) and _within(own["segment_length"], 1, tokens + 1)
        and _within(own["segment_position"], 0, tokens)
        and _within(starts[is_factor], 0, len(factored)) and _within(starts[~is_factor], 0, stored)
        and _within((starts + own["segment_length"])[~is_factor], 0, stored + 1)
    )  # fmt: skip
    if not sound:
        raise ValueError("its span tables point outside of what is stored")
    spans.lengths, spans.positions = own["lengths"].clone(), own["positions"].clone()
    for name, dim, rows in (
        ("mean_k", site.key_dim, heads),
        ("mean_v", site.value_dim, heads),
        ("vectors", None, site.q_heads),
    ):
        if f"{name}.codes" not in own:
            continue
        dim = getattr(spans.components.router, "routing_dim", 0) if dim is None else dim
        width = dim if summary.bits == 8 else (dim + 1) // 2
        codes = _expect(own[f"{name}.codes"], f"{name}.codes", (rows, m, width), torch.uint8).clone()
        scale = _expect(own[f"{name}.scale"], f"{name}.scale", (rows, m, 1), torch.float16).clone()
        setattr(spans, name, Quantized(codes, scale, summary.bits, dim))
    if m and spans.mean_k is None:
        raise ValueError("its spans have no means")
    if "norms" in own:
        spans.norms = _expect(own["norms"], "norms", (site.q_heads, m), torch.float16).clone()
    for name, part in spans.host_tokens.parts.items():
        part.append(_expect(own[f"tokens.{name}"], f"tokens.{name}", (heads, stored, *part._tail), part.data.dtype))
    if len(factored):
        _fill_factors(spans, own, len(factored))


def _fill_factors(spans: FoldedSpans, own: dict[str, Tensor], count: int) -> None:
    factors, heads = spans.host_factors, spans.site.kv_heads
    for name in ("key_rank", "value_rank"):
        setattr(factors, name, _expect(own[f"factors.{name}"], name, (heads, count), torch.int64).clone())
    factors.lengths = _expect(own["factors.lengths"], "factors.lengths", (count,), torch.int64).clone()
    if not (
        _within(factors.lengths, 1, 1 << 24)
        and _within(factors.key_rank, 1, 257)
        and _within(factors.value_rank, 1, 257)
    ):
        raise ValueError("its factors have impossible sizes")
    for kind in factors.KINDS:
        side, which = kind.split("_")
        rank = factors.key_rank if side == "key" else factors.value_rank
        dim = factors.key_dim if side == "key" else factors.value_dim
        size = {"u": factors.lengths[None] * rank, "s": rank, "v": dim * rank}[which]
        flat = own[f"factors.{kind}"]
        _expect(flat, kind, (1, flat.shape[-1]), factors.dtype)
        offsets = _expect(own[f"factors.{kind}.offsets"], f"{kind}.offsets", (heads, count), torch.int64).clone()
        if not _within(offsets, 0, flat.shape[1]) or bool((offsets + size > flat.shape[1]).any()):
            raise ValueError(f"its {kind} factors point outside of what is stored")
        factors.packed[kind].append(flat)
        factors.offsets[kind] = offsets


def _expect(x: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {dtype} {tuple(shape)}")
    return x


def _within(x: Tensor, low: int, high: int) -> bool:
    return not x.numel() or (int(x.min()) >= low and int(x.max()) < high)


__all__ = ["row_from_tensors", "row_to_tensors"]
