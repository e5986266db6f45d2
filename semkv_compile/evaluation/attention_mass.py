"""How much of the attention that looks far a memory's choice catches, by layer and query head: why a method loses, before tasks show that.

*Far* is what lies behind the first tokens and before the recent ones, which every method has. True attention is that of the memory's own
queries over the keys of all tokens, which the prompt's record still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semkv.evaluation.schema import Mass
from semkv.ir.site import AttentionSite
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.blocks import zoomed_units
from semkv.runtime.store.site_memory import SiteMemory

SINKS, WINDOW = 4, 32
"""First and recent tokens that are not far."""


class MassWatch:
    """Watches the steps of a state of one row (`State.watch`), made from `record`, whose heads are in the order of the state's program.

    Sites with a sliding window are left out, and those whose attention has a bias by distance: their weights do not follow from queries and
    keys alone.
    """

    def __init__(self, record: RowRecord) -> None:
        self._keys: dict[int, Tensor] = {store: record.keys[store].float() for store in record.keys}
        self._sums: dict[int, tuple[AttentionSite, Tensor]] = {}

    def attended(
        self, site: AttentionSite, owner: bool, q: Tensor, k: Tensor, positions: Tensor, parts: Sequence[SiteMemory]
    ) -> None:
        """`site` reads its memory for q [Hq, T, D] at `positions` [T], after the new keys k [Hkv, T, D] came in where it owns the store."""
        if owner:
            self._keys[site.store] = torch.cat([self._keys[site.store], k.float().cpu()], 1)
        if site.treatment == "window" or site.has_bias:
            return
        keys, places = self._keys[site.store], positions.cpu().long()
        weights = _weights(site, q.float().cpu(), keys, places)
        far = torch.arange(keys.shape[1], dtype=torch.int64, device="cpu")[None]
        far = (far >= SINKS) & (far <= places[:, None] - WINDOW)  # [T, n]
        weights = weights * far
        held = torch.cat([_held(part, keys.shape[1], len(places)) for part in parts]) & far
        ranked = weights.sort(-1, descending=True).values.cumsum(-1)
        count = held.sum(-1, keepdim=True)
        best = torch.where(count > 0, ranked.gather(-1, (count - 1).clamp(min=0)), 0.0)
        told = torch.stack([(weights * held).sum((1, 2)), best.sum((1, 2)), weights.sum((1, 2))])
        self._sums[site.index] = site, told.double() + (self._sums[site.index][1] if site.index in self._sums else 0.0)

    def mass(self) -> Mass | None:
        """What was seen, heads in the order of the model; None where nothing was."""
        if not self._sums:
            return None
        sites = sorted(self._sums)
        rows = {index: _in_model_order(*self._sums[index]) for index in sites}
        caught, best, far = ([rows[index][place].tolist() for index in sites] for place in range(3))
        return Mass(sites=sites, caught=caught, best=best, far=far)


def _weights(site: AttentionSite, q: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """True attention [Hq, T, n] of q [Hq, T, D] over keys [Hkv, n, D] up to each query's place."""
    logits = (q.unflatten(0, (site.kv_heads, -1)) @ keys[:, None].transpose(-1, -2)).flatten(0, 1) * site.scale
    if site.softcap:
        logits = site.softcap * torch.tanh(logits / site.softcap)
    past = torch.arange(keys.shape[1], dtype=torch.int64, device="cpu")[None] <= places[:, None]
    return logits.masked_fill(~past, float("-inf")).softmax(-1)


def _held(part: SiteMemory, tokens: int, queries: int) -> Tensor:
    """bool [Hq, T, tokens]: what each query head of a part read at full resolution in the last step."""
    heads, group = part.site.kv_heads, part.site.group_size
    held = torch.zeros(heads * group, queries, tokens, dtype=torch.bool, device="cpu")
    for store in (part.kept, part.recent):
        at = store.positions[:, : store.length].long().cpu().expand(heads, -1)
        held |= _marked(at, torch.ones_like(at, dtype=torch.bool), tokens).repeat_interleave(group, 0)[:, None]
    slots, zoomed = part.slots, part.zoomed
    if slots is None or zoomed is None:
        return held
    zoomed, spans = zoomed.cpu(), part.spans
    assert spans is not None
    there = [(slots.positions.cpu().long(), spans.places.units_of(slots.places.cpu()))] if slots.filled else []
    if part.factors.there is not None:
        at, unit = part.factors.there.positions.long().cpu(), part.factors.there.unit.cpu()
        there.append((at.flatten(1), unit.repeat_interleave(at.shape[2], 1)))
    for at, unit in there:
        read = zoomed_units(zoomed, unit, part.site)
        at = at.repeat_interleave(group, 0)[:, None].expand(-1, zoomed.shape[1], -1)
        held |= _marked(at.flatten(0, 1), read.flatten(0, 1), tokens).unflatten(0, (heads * group, -1))
    return held


def _marked(at: Tensor, read: Tensor, tokens: int) -> Tensor:
    """bool [rows, tokens]: the places at [rows, m] that are `read` and are tokens."""
    read = read & (at >= 0) & (at < tokens)
    marks = torch.zeros(len(at), tokens, dtype=torch.int32, device="cpu")
    return marks.scatter_add_(1, at.clamp(0, tokens - 1), read.int()) > 0


def _in_model_order(site: AttentionSite, told: Tensor) -> Tensor:
    """told [3, Hq] with the heads where the model has them."""
    if not site.head_order:
        return told
    order = torch.tensor(site.head_order, dtype=torch.int64, device="cpu").argsort()
    return told.unflatten(1, (site.kv_heads, -1))[:, order].flatten(1, 2)


def add_masses(first: Mass | None, second: Mass | None) -> Mass | None:
    """Both together; of the same sites."""
    if first is None or second is None:
        return first or second

    def both(name: str) -> Any:
        pairs = zip(getattr(first, name), getattr(second, name), strict=True)
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]

    return Mass(sites=first.sites, caught=both("caught"), best=both("best"), far=both("far"))
