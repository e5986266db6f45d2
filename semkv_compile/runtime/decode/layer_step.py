"""A layer's part in a decode step, on tensors: append, score, choose, fetch, attend. Read it from top to bottom.

It is traced into the program of a step (`semkv.runtime.splice`): sizes never depend on data, what is absent is masked, and no size of what
grows (kept and recent tokens, slots, units, waiting tokens) stands in it, so that a trace serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from semkv.ir import state_ops
from semkv.ir.ops import mixed_attention
from semkv.ir.site import AttentionSite
from semkv.runtime.components import Components, ExactKeys, Giver, Passer, Rest, Scorer
from semkv.runtime.decode.units import Units
from semkv.runtime.store.slots import NAMES, unfold

NEG_INF = float("-inf")
SLOTS = (*NAMES, "positions", "places")
PLACES = "places.by_position"
"""A tensor without numbers that has a place for each position, where a layer passes on what it knows of them."""

NUMBERS = ("at", "count", "room", "start", "shift")
"""What changes with each step, of a part of a row: where its newest token goes among the recent ones, how many units there are, what may be
unfolded (in tokens, or in units where all are alike), and `Places.start` and `shift`."""


@dataclass(frozen=True)
class Layer:
    """What a trace of `attend_step` is of.

    site: the KV heads that it is for. owner: whether the store is the site's own, so that it appends. length: of `Places`. tensors: names
    of those that there are. scored: whether an evictor counts what exact tokens are given. reads: whether units may unfold.
    factors: the most tokens and components of a span, where units wait as low-rank factors. terms: of `semkv::mixed_attention`, such as
    its scale. passer: leaves tensors for later layers, under the names `passes`.
    """

    site: AttentionSite
    components: Components
    owner: bool
    reads: bool
    length: int
    tensors: tuple[str, ...]
    factors: tuple[int, int] | None = None
    terms: Mapping[str, object] = field(default_factory=dict, hash=False)
    passer: Passer | None = None
    passes: tuple[str, ...] = ()

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind have the same trace."""
        site = self.site
        sizes = (
            site.q_heads,
            site.kv_heads,
            site.key_dim,
            site.value_dim,
            site.scale,
            site.softcap,
            site.window,
            site.has_bias,
        )
        terms = tuple(sorted((name, repr(value)) for name, value in self.terms.items()))
        return (
            id(self.components),
            sizes,
            self.owner,
            self.reads,
            self.length,
            self.tensors,
            self.factors,
            terms,
            id(self.passer),
            self.passes,
        )


def attend_step(
    layer: Layer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    numbers: Tensor,
    tensors: Mapping[str, Tensor],
    terms: Mapping[str, Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Store a new token of each row and attend for it.

    q [B, Hq, 1, D], k [B, Hkv, 1, D], v [B, Hkv, 1, Dv], positions int64 [B, 1]; numbers int64 [len(NUMBERS), B]; tensors: by the names of
    `SiteMemory.step_tensors`, [B, ...]; terms: sinks and biases of the layer's heads.

    Returns the output [B, Hq, 1, Dv] and, where units may unfold, (tokens copied and tokens that were there, or bytes of factors, int64
    [B, 2]; units that each head reads, int64 [B, Hkv or Hq]); and what the layer passes on.
    """
    at, count, room, start, shift = numbers.unbind(0)
    if layer.owner:
        append(tensors, k, v, positions, at)
    blocks, exact, grouped = Blocks(), exact_tokens(tensors), group(layer.site, q)
    if layer.owner and isinstance(layer.components.evictor, Giver):
        credit(layer, exact, tensors, grouped, positions)
    passed: dict[str, Tensor] = {}
    if layer.passer is not None:
        held = [*exact_keys(exact, tensors), *waiting_keys(tensors, start + count, shift)]
        passed = layer.passer.passed(layer.site, grouped, held, positions, tensors[PLACES])
        tensors = {**tensors, **passed}
    for name in exact:
        blocks.add(tensors, name)
    told: tuple[Tensor, ...] = ()
    if layer.reads:
        units = Units(layer.site, tensors, count)
        router = layer.components.router
        assert isinstance(router, Scorer)
        score = router.scores(layer.site, grouped, units)
        chosen, own = choose(layer, score, count, room, tensors)
        if layer.factors is not None:
            moved = attend_factors(layer, blocks, grouped, chosen, own, positions, units)
        else:
            moved = fetch(layer, chosen, start, shift, tensors)
            blocks.add(tensors, "slots", bias=None if own is None else slot_bias(layer, own, start, tensors))
        told = (moved, read_units(layer, chosen, own))
        attend_folded(layer, blocks, score, chosen, own, units)
    elif layer.components.summary is not None and "lengths" in tensors:
        attend_means(layer, blocks, None, Units(layer.site, tensors, count))
    out = mixed_attention(q, positions, *blocks.arguments(), **terms, **layer.terms)
    return out, (*told, *(passed[name] for name in layer.passes))


def append(tensors: Mapping[str, Tensor], k: Tensor, v: Tensor, positions: Tensor, at: Tensor) -> None:
    """Write the new token into the recent ones, at `at` int64 [B]."""
    held = {name: tensors.get(f"recent.{name}") for name in ("k", "v", "positions", "k_scale", "v_scale")}
    state_ops.append_(held["k"], held["v"], held["positions"], k, v, positions, at, held["k_scale"], held["v_scale"])


def exact_tokens(tensors: Mapping[str, Tensor]) -> list[str]:
    """The kinds of exact tokens that there are."""
    return [name for name in ("kept", "recent") if f"{name}.k" in tensors]


def exact_keys(exact: list[str], tensors: Mapping[str, Tensor]) -> list[ExactKeys]:
    """Their keys."""
    return [
        ExactKeys(tensors[f"{name}.k"], tensors.get(f"{name}.k_scale"), tensors[f"{name}.positions"]) for name in exact
    ]


def waiting_keys(tensors: Mapping[str, Tensor], end: Tensor, shift: Tensor) -> list[ExactKeys]:
    """The keys of tokens that wait at places before `end` int64 [B], whose positions are `shift` int64 [B] above their places."""
    if "waiting.k" not in tensors:
        return []
    k = tensors["waiting.k"]
    place = torch.ones_like(k[:, :1, :, 0], dtype=torch.int64).cumsum(-1) - 1
    positions = torch.where(place < end.view(-1, 1, 1), place + shift.view(-1, 1, 1), state_ops.EMPTY)
    return [ExactKeys(k, tensors.get("waiting.k_scale"), positions)]


def credit(layer: Layer, exact: list[str], tensors: Mapping[str, Tensor], grouped: Tensor, positions: Tensor) -> None:
    """Add what the new token attends to to the scores of the exact tokens."""
    evictor = layer.components.evictor
    assert isinstance(evictor, Giver)
    for name, added in zip(exact, evictor.given(layer.site, grouped, exact_keys(exact, tensors), positions)):
        tensors[f"{name}.scores"].add_(added)


def group(site: AttentionSite, q: Tensor) -> Tensor:
    """Queries [B, Hq, 1, D] -> float32 [B, Hkv, group, D]: a KV head's index is read once for its group."""
    return q.float().view(q.shape[0], site.kv_heads, site.group_size, site.key_dim)


def choose(
    layer: Layer, score: Tensor, count: Tensor, room: Tensor, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Units bool [B, Hkv, M] that unfold by score [B, Hkv, G, M]; which of them each query head reads, bool [B, Hkv, G, M], where that
    differs."""
    cost = None if layer.length else tensors["lengths" if layer.factors is None else "factors.costs"]
    if layer.components.fill:
        return state_ops.choose(score, count, room, None, cost), None
    return state_ops.choose_each(score, count, room, tensors["threshold"], cost)


def fetch(layer: Layer, chosen: Tensor, start: Tensor, shift: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Have the slots hold the chosen units; tokens that were copied and that were there, int64 [B, 2]."""
    slots = {name: tensors[f"slots.{name}"] for name in SLOTS if f"slots.{name}" in tensors}
    waiting = {name: tensors[f"waiting.{name}"] for name in SLOTS if f"waiting.{name}" in tensors}
    bounds, order, where = (tensors.get(f"places.{name}") for name in ("bounds", "order", "where"))
    return unfold(
        slots, chosen, waiting, start, shift, layer.length, bounds, order, None if where is None else where[:, 0]
    )


def attend_factors(
    layer: Layer,
    blocks: Blocks,
    q: Tensor,
    chosen: Tensor,
    own: Tensor | None,
    positions: Tensor,
    units: Units,
) -> Tensor:
    """An entry for what attention to the chosen units' factors gives; bytes of factors that were not there and that were, int64 [B, 2]."""
    assert layer.factors is not None
    names = ("held", "data", "where", "spans", "unit")
    held = [units.tensors[f"factors.{name}"] for name in names]
    terms = (layer.terms["scale"], layer.terms.get("softcap", 0.0), layer.terms.get("window", 0))
    value, mass, told = state_ops.factored_attention_(
        q, chosen, *held, positions[:, 0], layer.site.value_dim, *layer.factors, *terms, own
    )
    blocks.add_rest(layer.site, value, mass, eye=units.constant("eye"))
    return told


def slot_bias(layer: Layer, own: Tensor, start: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """float32 [B, Hq, 1, C]: 0 where a query head reads a slot's unit, own bool [B, Hkv, G, M], else -inf."""
    places = tensors["slots.places"]
    if layer.length:
        unit = torch.div(places - start.view(-1, 1, 1), layer.length, rounding_mode="floor")
    else:
        bounds = tensors["places.bounds"].expand(-1, places.shape[1], -1)
        unit = torch.searchsorted(bounds.contiguous(), places, right=True) - 1
    unit = torch.minimum(unit.clamp(min=0), tensors.get("last_unit", unit).clamp(min=0))
    seen = own.gather(3, unit[:, :, None].expand(-1, -1, own.shape[2], -1).long()) & (places >= 0)[:, :, None]
    return per_query_head(layer.site, torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, NEG_INF))


def per_query_head(site: AttentionSite, x: Tensor) -> Tensor:
    """x [B, Hkv|1, G|1, n] -> [B, Hq, 1, n], in words that hold for every n."""
    return x.expand(-1, site.kv_heads, site.group_size, -1).contiguous().view(x.shape[0], site.q_heads, 1, -1)


def read_units(layer: Layer, chosen: Tensor, own: Tensor | None) -> Tensor:
    """Units that each KV head, or query head where they differ, reads: int64 [B, H]."""
    return chosen.sum(-1) if own is None else own.sum(-1).flatten(1, 2)


def attend_folded(
    layer: Layer, blocks: Blocks, score: Tensor, chosen: Tensor, own: Tensor | None, units: Units
) -> None:
    """Entries for the units that stay folded, where the method has some."""
    summary, router = layer.components.summary, layer.components.router
    if summary is not None and summary.attend:
        attend_means(layer, blocks, chosen if own is None else own, units)
    elif summary is None and isinstance(router, Rest) and router.has_rest(layer.site):
        value, mass = router.rest(layer.site, score, chosen, own, units)
        blocks.add_rest(layer.site, value, mass, eye=units.constant("eye"))


def attend_means(layer: Layer, blocks: Blocks, read: Tensor | None, units: Units) -> None:
    """Each unit that is not read unfolded is an entry: its mean key and value, with the logarithm of its size."""
    site, sizes = layer.site, units.tensors["lengths"]
    exists = units.exists(sizes)
    bias = sizes.float().clamp(min=1).log().masked_fill(~exists, NEG_INF)[:, :, None]  # [B, Hkv|1, 1, M]
    if read is not None:
        read = read if read.dim() == 4 else read[:, :, None]
        bias = bias.masked_fill(read, NEG_INF)
    bias = per_query_head(site, bias)
    positions = units.tensors["positions"]
    blocks.add_entries(units.numbers("mean_k"), units.numbers("mean_v"), positions, bias)


class Blocks:
    """Blocks of entries, as `semkv::mixed_attention` takes them."""

    def __init__(self) -> None:
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.bias: list[Tensor | None] = []
        self.k_scale: list[Tensor | None] = []
        self.v_scale: list[Tensor | None] = []

    def add(self, tensors: Mapping[str, Tensor], name: str, bias: Tensor | None = None) -> None:
        """Exact tokens of one kind."""
        own = {part: tensors.get(f"{name}.{part}") for part in ("k", "v", "positions", "k_scale", "v_scale")}
        self.add_entries((own["k"], own["k_scale"]), (own["v"], own["v_scale"]), own["positions"], bias)

    def add_entries(
        self, k: tuple[Tensor, Tensor | None], v: tuple[Tensor, Tensor | None], positions: Tensor, bias: Tensor | None
    ) -> None:
        for mine, x in zip((self.k, self.k_scale, self.v, self.v_scale), (*k, *v)):
            mine.append(x)
        self.positions.append(positions)
        self.bias.append(bias)

    def add_rest(self, site: AttentionSite, value: Tensor, mass: Tensor, *, eye: Tensor) -> None:
        """What attention to everything else gives, value [B, Hkv, G, Dv] of the mass that is the exponential of `mass` [B, Hkv, G]: for
        each query head an entry of its own, whose key says nothing and whose bias is all. eye bool [G, G]."""
        k = value.new_zeros((*value.shape[:3], site.key_dim))
        own = torch.where(eye, mass[..., None], NEG_INF).flatten(1, 2)[:, :, None]  # [B, Hq, 1, G]
        positions = torch.zeros_like(mass[:, :1], dtype=torch.int32)
        self.add_entries((k, None), (value, None), positions, own)

    def arguments(self) -> tuple[object, ...]:
        """Those of the operator, from `block_k` on."""

        def some(given: list[Tensor | None]) -> list[Tensor | None] | None:
            return given if any(x is not None for x in given) else None

        return (self.k, self.v, self.positions, some(self.bias), None, some(self.k_scale), some(self.v_scale))


__all__ = ["NUMBERS", "PLACES", "Layer", "attend_step"]
