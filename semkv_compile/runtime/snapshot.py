"""One row's memory as named tensors and plain facts, and back, with every size and index checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.budgets.costs import form_of
from semkv.runtime.budgets.part_shares import sharing_parts
from semkv.runtime.components import Part
from semkv.runtime.decode.traffic import Traffic
from semkv.runtime.placement import Placement
from semkv.runtime.prompt.content import UNKNOWN
from semkv.runtime.prompt.past import Past
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.store.quantization import CODE_BITS, Quantized, code_width
from semkv.runtime.store.segments import Boundary
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.slots import Slots
from semkv.runtime.store.spans import FoldedSpans
from semkv.runtime.store.tables import FACTORS, Tables
from semkv.runtime.store.token_store import TokenStore
from semkv.runtime.text import Text

LARGEST_TURN = 1 << 31
"""How far rotary positions may lie above places: users may give any."""

SEGMENTS = ("segment_unit", "segment_kind", "segment_length", "segment_position", "segment_start")


def row_to_tensors(row: RowMemory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(facts, tensors) from which `row_from_tensors` makes an equal row. Traffic is not kept."""
    facts: dict[str, Any] = {"tokens": row.tokens, "prompt": row.prompt, "stores": sorted(row.stores), "folded": []}
    facts["shares"] = [[store, share] for store, share in sorted(row.shares.items())]
    facts["part_shares"] = [[store, first, share] for (store, first), share in sorted(row.part_shares.items())]
    facts["exact"] = row.exact
    if row.turned:
        facts["turned"] = row.turned
    tensors = {f"notes.{name}": x.contiguous() for name, x in row.notes.items()}
    for site, states in row.recurrent.items():
        tensors |= {f"recurrent.{site}.{number}": x[0].contiguous() for number, x in enumerate(states)}
    tensors |= {"ids": row.text.ids.to(torch.int32), "surprisal": row.text.surprisal}
    if row.past is not None:
        tensors |= {f"past.{name}": x.contiguous() for name, x in row.past.to_tensors().items()}
    for store, parts in row.stores.items():
        for number, memory in enumerate(parts):
            own = {f"kept.{name}": x for name, x in memory.kept.to_tensors().items()}
            own |= {f"recent.{name}": x for name, x in memory.recent.to_tensors().items()}
            own |= (
                {"unit_state": torch.tensor([memory.unit_state], dtype=torch.int64, device="cpu")}
                if memory.unit_state
                else {}
            )
            if memory.spans is not None:
                facts["folded"].append([store, number])
                if memory.boundary is not None:
                    level = [memory.boundary.nats, memory.boundary.alpha]
                    own["boundary"] = torch.tensor(level, dtype=torch.float64, device="cpu")
                own |= _span_tensors(memory.spans)
                if memory.slots is not None:  # sums go on in the same order
                    own["slots.places"] = memory.slots.places.cpu()
            tensors |= {f"{store}.{number}.{name}": x.contiguous() for name, x in own.items()}
    return facts, tensors


def _span_tensors(spans: FoldedSpans) -> dict[str, Tensor]:
    tables = spans.tables
    out = {name: getattr(tables, name) for name in (*SEGMENTS, "lengths", "positions")}
    out |= {"retired": spans.retired.data[0]} if spans.retired.length else {}
    out |= {"mass": tables.mass} if tables.mass.numel() else {}
    held = {"mean_k": spans.mean_k, "mean_v": spans.mean_v, **{f"index.{name}": x for name, x in spans.index.items()}}
    for name, part in held.items():
        if isinstance(part, Quantized):
            out |= {f"{name}.codes": part.codes, f"{name}.scale": part.scale}
        elif part is not None:
            out[name] = part
    out |= {f"tokens.{name}": part.data for name, part in spans.host_tokens.parts.items()}
    factors = spans.host_factors
    if factors.spans:
        out |= {
            "factors.numbers": factors.numbers.data,
            "factors.offsets": factors.offsets,
            "factors.key_rank": factors.key_rank,
            "factors.value_rank": factors.value_rank,
            "factors.lengths": factors.lengths,
        }
    return out


def row_from_tensors(placement: Placement, facts: dict[str, Any], tensors: dict[str, Tensor]) -> RowMemory:
    """The row that `row_to_tensors` described; `ValueError` or `KeyError` where facts and tensors do not fit `placement`."""
    row = object.__new__(RowMemory)
    row.tokens, row.exact = facts["tokens"], facts.get("exact", False) is True
    stores = placement.stores
    if not isinstance(row.tokens, int) or row.tokens < 1 or facts["stores"] != sorted(stores):
        raise ValueError(f"{row.tokens!r} tokens in stores {facts['stores']!r}, expected stores {sorted(stores)}")
    row.text = _text(tensors["ids"], tensors["surprisal"], row.tokens, placement.program.vocab_size)
    row.turned = facts.get("turned", 0)
    if type(row.turned) is not int or not -row.tokens <= row.turned <= LARGEST_TURN:
        raise ValueError(f"rotary positions that lie {row.turned!r} above places")
    row.prompt = facts.get("prompt", row.tokens)
    if not isinstance(row.prompt, int) or not 1 <= row.prompt <= row.tokens:
        raise ValueError(f"a prompt of {row.prompt!r} tokens in a row of {row.tokens}")
    if row.exact:
        counted = row.prompt if placement.plan.keeps_generated else row.tokens
        if not placement.budget.exact(counted):
            raise ValueError(f"it holds all of {counted} tokens, which its budget does not")
        row.past = Past.from_tensors(placement, _named(tensors, "past."), row.tokens) if placement.outgrown else None
        placement = placement.whole
    row.placement, row.traffic, row.passing, row._staying = placement, Traffic(), {}, {}
    row.shares = _shares(placement, facts["shares"])
    row.part_shares = _part_shares(placement, facts.get("part_shares", []))
    row.notes = {}
    for name, x in _named(tensors, "notes.").items():
        if name not in placement.plan.notes:
            raise ValueError(f"it remembers {name!r}, which this method does not")
        row.notes[name] = placement.plan.notes[name].check(x, name).clone()
    row.recurrent = _recurrent(placement, tensors, row.tokens)
    row.stores = {}
    for number, store in stores.items():
        memories = []
        for place, part in enumerate(placement.parts(store)):
            own = _named(tensors, f"{number}.{place}.")
            folded = [number, place] in facts["folded"]
            memories.append(_memory(placement, store, part, own, folded, row.tokens, row.prompt))
        row.stores[number] = tuple(memories)
        if row.exact and store.treatment == "method" and memories[0].recent.length != row.tokens:
            raise ValueError(
                f"store {number} holds {memories[0].recent.length} tokens of a row that keeps all {row.tokens}"
            )
    return row


def _recurrent(placement: Placement, tensors: dict[str, Tensor], tokens: int) -> dict[int, list[Tensor]]:
    """The states of each recurrent site, with a dimension of rows."""
    found: dict[int, list[Tensor]] = {}
    for site in (*placement.program.stateful, *placement.program.choosers):
        found[site.index] = []
        for number, form in enumerate(site.states):
            name = f"recurrent.{site.index}.{number}"
            held = _expect(tensors[name], name, (tokens, *form.shape) if site.chooses else form.shape, form.dtype)
            found[site.index].append(held.to(placement.device, copy=True)[None])
    return found


def _text(ids: Tensor, surprisal: Tensor, tokens: int, vocab_size: int) -> Text:
    if (
        ids.dtype != torch.int32
        or ids.shape != (tokens,)
        or not UNKNOWN <= int(ids.min()) <= int(ids.max()) < vocab_size
    ):
        raise ValueError(f"ids {ids.dtype} {tuple(ids.shape)}, expected {tokens} of a vocabulary of {vocab_size}")
    return Text(ids, _expect(surprisal, "surprisal", (tokens,), torch.float32))


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of them."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _shares(placement: Placement, listed: list[list[Any]]) -> dict[int, float]:
    shares = dict(listed)
    expected = sorted(store.store for store in placement.budgeted)
    sound = sorted(shares) == expected and all(isinstance(x, float) and 0 < x <= 1 for x in shares.values())
    if not sound or (shares and abs(sum(shares.values()) - 1) > 1e-6):
        raise ValueError(f"shares {listed!r} do not divide a budget among the stores {expected}")
    return shares


def _part_shares(placement: Placement, listed: list[list[Any]]) -> dict[tuple[int, int], float]:
    shares = {(store, first): share for store, first, share in listed}
    expected = sorted((store.store, part.first) for store, part in sharing_parts(placement))
    sound = sorted(shares) == expected and all(isinstance(x, float) and 0 <= x <= 1 for x in shares.values())
    some = bool(placement.plan.together)  # the other processes' parts have the rest
    total = sum(shares.values())
    if not sound or (shares and (total > 1 + 1e-6 or (total < 1 - 1e-6 and not some))):
        raise ValueError(f"part shares {listed!r} do not divide what whole heads leave among the parts {expected}")
    return shares


def _memory(
    placement: Placement,
    store: AttentionSite,
    part: Part,
    own: dict[str, Tensor],
    folded: bool,
    tokens: int,
    prompt: int,
) -> SiteMemory:
    """The memory of one part of a store, of a row of `tokens` tokens, the first `prompt` of them a prompt."""
    site = part.site(store, part.share)
    heads, dtype, device = site.kv_heads, placement.budget.dtype, placement.device
    exact = {}
    for name in ("kept", "recent"):
        positions = own[f"{name}.positions"]
        n = positions.shape[1] if positions.dim() == 2 else -1
        form = form_of(part.components, kept=name == "kept")
        k, v = (
            _held(own, f"{name}.{kind}", (heads, n, dim), dtype, form, device)
            for kind, dim in (("k", site.key_dim), ("v", site.value_dim))
        )
        _expect(positions, f"{name}.positions", (positions.shape[0], n), torch.int32)
        if positions.shape[0] not in (1, heads) or not _within(positions, 0, tokens):
            raise ValueError(f"{name}.positions are not positions of {tokens} tokens in {heads} heads")
        scores = _scores(own, f"{name}.scores", (heads, n)) if part.components.evictor is not None else None
        exact[name] = TokenStore(
            k,
            v,
            positions.to(device),
            placement.page_size,
            reserve=placement.uncapped(site) and name == "recent",
            scores=None if scores is None else scores.to(device),
        )
    state = _expect(
        own.get("unit_state", torch.zeros(1, dtype=torch.int64, device="cpu")), "unit_state", (1,), torch.int64
    )
    of_prompt = max(0, exact["recent"].length - (tokens - prompt))
    kept = placement.plan.keeps_generated and store.treatment == "method"
    if kept and exact["recent"].length < tokens - prompt:
        raise ValueError(f"{exact['recent'].length} recent tokens, of which {tokens - prompt} followed the prompt")
    spans = boundary = None
    if folded and part.components.cutting is not None:
        level = _expect(own["boundary"], "boundary", (2,), torch.float64)
        if bool(level.isnan().any()):
            raise ValueError("boundary is not a number, expected a surprisal")
        boundary = Boundary(*level.tolist())
    if folded:
        spans = FoldedSpans(site, part.components, dtype, tier=placement.tier, device=placement.where(site, tokens))
        _fill_spans(spans, own, tokens)
    memory = SiteMemory(
        site,
        part.components,
        exact["kept"],
        exact["recent"],
        spans,
        unit_state=int(state),
        of_prompt=of_prompt,
        boundary=boundary,
        device=device,
    )
    if spans is not None and "slots.places" in own:
        memory.slots = _slots(spans, own["slots.places"], device)
    return memory


def _held(
    own: dict[str, Tensor], name: str, shape: tuple[int, int, int], dtype: torch.dtype, form: str, device: torch.device
) -> Tensor | Quantized:
    """Keys or values of exact tokens."""
    if form == "raw":
        return _expect(own[name], name, shape, dtype).to(device)
    bits = CODE_BITS[form]
    codes = _expect(own[name], name, (*shape[:2], code_width(shape[2], bits)), torch.uint8).to(device)
    scale = _expect(own[f"{name}_scale"], f"{name}_scale", (*shape[:2], 1), torch.float16).to(device)
    return Quantized(codes, scale, bits, shape[2])


def _slots(spans: FoldedSpans, places: Tensor, device: torch.device) -> Slots:
    """The slots with each token in the one that it had."""
    _expect(places, "slots.places", (spans.site.kv_heads, places.shape[1] if places.dim() == 2 else -1), torch.int32)
    distinct = places.sort(1).values
    twice = (distinct[:, 1:] == distinct[:, :-1]) & (distinct[:, 1:] >= 0)
    if not _within(places, -1, spans.host_tokens.length) or bool(twice.any()):
        raise ValueError("its slots do not hold tokens that wait, each once")
    slots = Slots(spans.site.kv_heads, spans.room_kinds, device)
    slots.take(places, spans)
    return slots


def _scores(own: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    scores = _expect(own[name], name, shape, torch.float32)
    if not bool(torch.isfinite(scores).all()) or bool((scores < 0).any()):
        raise ValueError(f"{name} are no accumulated weights: some are negative or not finite")
    return scores


def _fill_spans(spans: FoldedSpans, own: dict[str, Tensor], tokens: int) -> None:
    site = spans.site
    heads, m = site.kv_heads, own["lengths"].shape[-1]
    rows, segments = own["segment_unit"].shape
    rows = own["lengths"].shape[0] if spans.components.host_form == "none" else rows
    stored = own["tokens.k"].shape[1]
    if rows not in (1, heads):
        raise ValueError(f"units of {rows} heads, expected 1 or {heads}")
    _expect(own["lengths"], "lengths", (rows, m), torch.int32)
    _expect(own["positions"], "positions", (rows, m), torch.int32)
    tables: dict[str, Any] = {name: own[name].clone() for name in ("lengths", "positions")}
    tables["mass"] = torch.zeros(1, 0, dtype=torch.float32, device="cpu")
    for name in SEGMENTS:
        shape = (own[name].shape[0], segments) if name == "segment_unit" else (segments,)
        tables[name] = _expect(own[name], name, shape, torch.int64).clone()
    factored = own["factors.lengths"] if "factors.lengths" in own else torch.zeros(0, dtype=torch.int64, device="cpu")
    starts = own["segment_start"]
    is_factor = own["segment_kind"] == FACTORS
    sound = (
        _within(own["lengths"], 0 if rows > 1 else 1, tokens + 1)
        and _within(own["positions"], 0, tokens)
        and _within(own["segment_unit"], -1, m)
        and _within(own["segment_kind"], 0, 2)
        and _within(own["segment_length"], 1, tokens + 1)
        and _within(own["segment_position"], 0, tokens)
        and _within(starts[is_factor], 0, len(factored))
        and _within(starts[~is_factor], 0, stored)
        and _within((starts + own["segment_length"])[~is_factor], 0, stored + 1)
    )
    if not sound:
        raise ValueError("its span tables point outside of what is stored")
    summary = spans.components.summary
    if m and summary is not None and summary.weights == "surprisal":
        mass = _expect(own["mass"], "mass", (rows, m), torch.float32)
        if not bool(torch.isfinite(mass).all()) or bool((mass < 0).any()):
            raise ValueError("mass is no sum of surprisals: some are negative or not finite")
        tables["mass"] = mass.clone()
    spans.tables = Tables(**tables)
    if m:
        _fill_index(spans, own, m)
    if "retired" in own:
        spans.retired.append(_retired(own["retired"], tokens, stored)[None])
    for name, part in spans.host_tokens.parts.items():
        part.append(_expect(own[f"tokens.{name}"], f"tokens.{name}", (heads, stored, *part._tail), part.data.dtype))
    if len(factored):
        _fill_factors(spans, own, len(factored))


def _retired(x: Tensor, tokens: int, stored: int) -> Tensor:
    """Position, length and place int64 [R, 3] of segments that nothing routes to."""
    position, length, start = _expect(x, "retired", (x.shape[0], 3), torch.int64).unbind(1)
    sound = _within(position, 0, tokens) and _within(length, 1, tokens + 1) and _within(start, 0, stored)
    if not (sound and _within(position + length, 0, tokens + 1) and _within(start + length, 0, stored + 1)):
        raise ValueError("its retired segments point outside of what is stored")
    return x


def _fill_index(spans: FoldedSpans, own: dict[str, Tensor], units: int) -> None:
    """Summaries and the router's index of `units` units."""
    site, summary = spans.site, spans.components.summary
    if summary is not None:
        spans.mean_k = _mean(spans, own, "mean_k", units, site.key_dim)
        if summary.attend:
            spans.mean_v = _mean(spans, own, "mean_v", units, site.value_dim)
    for name, part in spans.index_parts.items():
        if part.bits is not None:
            spans.index[name] = _quantized(own, f"index.{name}", part.rows, units, part.dim, part.bits)
        else:
            given = _expect(own[f"index.{name}"], name, (part.rows, units, part.dim), part.dtype)
            spans.index[name] = given.clone()


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
    flat = own["factors.numbers"]
    _expect(flat, "factors.numbers", (1, flat.shape[-1]), factors.dtype)
    offsets = _expect(own["factors.offsets"], "factors.offsets", (heads, count), torch.int64).clone()
    size = factors.span_nbytes() // factors.dtype.itemsize
    if not _within(offsets, 0, flat.shape[1]) or bool((offsets + size > flat.shape[1]).any()):
        raise ValueError("its factors point outside of what is stored")
    factors.numbers.append(flat)
    factors.offsets = offsets


def _mean(spans: FoldedSpans, own: dict[str, Tensor], name: str, units: int, dim: int) -> Quantized | Tensor:
    heads, bits = spans.site.kv_heads, spans.components.summary.bits
    if bits == 16:
        return _expect(own[name], name, (heads, units, dim), spans.dtype).clone()
    return _quantized(own, name, heads, units, dim, bits)


def _quantized(own: dict[str, Tensor], name: str, rows: int, units: int, dim: int, bits: int) -> Quantized:
    width = (dim * bits + 7) // 8
    codes = _expect(own[f"{name}.codes"], f"{name}.codes", (rows, units, width), torch.uint8).clone()
    scale = _expect(own[f"{name}.scale"], f"{name}.scale", (rows, units, 1), torch.float16).clone()
    return Quantized(codes, scale, bits, dim)


def _expect(x: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {dtype} {tuple(shape)}")
    return x


def _within(x: Tensor, low: int, high: int) -> bool:
    return not x.numel() or (int(x.min()) >= low and int(x.max()) < high)


__all__ = ["row_from_tensors", "row_to_tensors"]
