"""Heads that follow another head of their layer: the pivot's attention chooses their tokens, anew when it has drifted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.routers import MeansSuffice
from semkv.methods.window_scores import attention_logits, pooled
from semkv.runtime.components import Brought, Cap, Note
from semkv.runtime.decode.units import Units
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.step import Step
from semkv.runtime.store.token_store import plain
from semkv.runtime.views import PartView, UnitsView


@dataclass(frozen=True)
class Heads:
    """Numbers per token, keys and values, over all layers that a method treats: of the heads that are whole, and of those that share what
    these leave."""

    whole: int
    sharing: int

    def base_length(self, cap: float, tokens: int, itemsize: int) -> int:
        """L_base of HeteroCache's Eq. 7: tokens of a sharing head on the mean, where a row of `tokens` may hold `cap` bytes."""
        if cap == float("inf"):
            return tokens
        return max(1, min(tokens, int((cap / itemsize - self.whole * tokens) / max(1, self.sharing))))


@dataclass(frozen=True, eq=False)
class PivotRouter(MeansSuffice):
    """A satellite's tokens in the order in which it ranked them itself at the end of the prompt, and since an update its pivot; units are
    single tokens.

    HeteroCache Sec. 4.3 and Alg. 1. A pivot's baseline are the L_base tokens that the prompt's last query gives most attention to (Eq. 7,
    line 19). Its queries are put by, and every `every` steps they are looked at: where the median overlap of their top sets with
    the baseline is below `tau_drift` (Eq. 9-10), the ranking by the last of them is its satellites' from the next query on,
    and its top set the new baseline. The other steps do nothing. What follows on a ranking, from its last `recent` tokens on, takes turns
    with it, the newest first: beside the window it has up to half of a satellite's slots.

    pivots: for the satellites, by (store, KV head in the lowered program), their pivot's KV head there. pool: width of the
    average pooling of weights. retrieve: False never looks (ablation). sites_of_pivots: (site, pivot's KV head) of every cluster.
    head_orders: where processes share a model, by store the user's model's KV head at each place of a program of all heads, whose places
    `pivots` are then; a pivot's process tells the others what its satellites there go by.
    """

    pivots: Mapping[tuple[int, int], int]
    every: int = 5
    tau_drift: float = 0.5
    pool: int = 5
    retrieve: bool = True
    sites_of_pivots: tuple[tuple[AttentionSite, int], ...] = ()
    heads: Heads = Heads(0, 1)
    recent: int = 32
    head_orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        at = spans.positions[0].long()
        end = int(at[-1]) + 1
        known: dict[int, Tensor] = {}
        rows = []
        for order in self.orders(step, site.first_head):
            if id(order) not in known:
                known[id(order)] = -turns(order.long(), end, self.recent)[at].float()
            rows.append(known[id(order)])
        return torch.stack(rows).expand(site.q_heads, -1, -1)

    @property
    def of_tokens(self) -> bool:
        """See `semkv.runtime.components.OfTokens`."""
        return True

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        return {}

    def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
        """See `semkv.runtime.components.Bringer`: what the units score, made again when they or the ranking change."""
        orders = [
            step.notes[order_note(step.site, head)] for head in range(site.first_head, site.first_head + site.kv_heads)
        ]
        basis = (spans.positions, *orders)
        if (
            spans.known is None
            or len(spans.known[0]) != len(basis)
            or any(a is not b for a, b in zip(spans.known[0], basis))
        ):
            at = spans.positions[0].long()
            end = int(at[-1]) + 1
            rows = torch.stack([-turns(order.long(), end, self.recent)[at].float() for order in orders])
            spans.known = basis, rows
        return Brought({"ranking": spans.room.whole("ranking", spans.known[1])})

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        return units.tensors["ranking"][:, :, None]

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), float("-inf"), dtype=torch.float32, device="cpu")

    def orders(self, step: Step, satellite: int) -> list[Tensor]:
        """The ranking int32 [n] of tokens that a satellite goes by, for each new query; before the site's turn that of the only one."""
        name = order_note(step.site, satellite)
        used = step.passing.get(name)
        return [step.notes[name]] if used is None else used  # type: ignore[return-value]

    # -- drift ---------------------------------------------------------------------------------------------------------

    def stored(self, step: Step) -> None:
        """The site's pivots put their queries by, and look at them when there are enough; see `semkv.runtime.components.AtSite`."""
        for site, pivot in self.sites_of_pivots:
            if site.index == step.site.index and self.retrieve:
                self._follow(step, pivot)

    def _follow(self, step: Step, pivot: int) -> None:
        notes, own, name = step.notes, self.alone(step.site, pivot), f"{step.site.index}.{pivot}"
        held = notes[f"pivot.queries.{name}"]
        asked = step.q[:0] if own is None else step.q[own.query_heads]
        waiting = torch.cat([held, asked.float().cpu()], 1)
        satellites = [order_note(step.site, head) for head in self.satellites(step.site, pivot)]
        used = {satellite: [notes[satellite]] * len(step.ids) for satellite in satellites}
        last = self.every - held.shape[1] - 1  # of the new queries, the one after which there are enough
        while waiting.shape[1] >= self.every:
            tokens = step.tokens + last + 1
            ranking = None if own is None else self._look(step, own, waiting[:, : self.every], tokens, name)
            ranking = self._told(step.site, pivot, ranking, tokens)
            waiting = waiting[:, self.every :].clone()
            if ranking is not None:
                for satellite in satellites:
                    notes[satellite] = ranking
                    used[satellite][last + 1 :] = [ranking] * (len(step.ids) - last - 1)
            last += self.every
        notes[f"pivot.queries.{name}"] = waiting
        step.passing.update(used)

    def _look(self, step: Step, own: AttentionSite, q: Tensor, tokens: int, name: str) -> Tensor | None:
        """Compare the top sets of the pivot's queries q [G, W, D], the last one being that of the row's token `tokens` - 1, with the
        baseline; the ranking int32 [tokens] by the last one where they have drifted."""
        notes, weights = step.notes, self.weights(step, own, q, tokens)
        base = notes[f"pivot.base.{name}"].long()
        inside = torch.zeros(tokens, dtype=torch.bool, device="cpu").index_fill_(0, base, True)
        tops = weights.topk(min(len(base), tokens), dim=1, sorted=False).indices
        drifted = median(inside[tops].sum(1).tolist()) / len(base) < self.tau_drift
        notes[f"pivot.checks.{name}"] = notes[f"pivot.checks.{name}"] + torch.tensor(
            [1, int(drifted)], dtype=torch.int64, device="cpu"
        )
        if not drifted:
            return None
        notes[f"pivot.base.{name}"] = tops[-1].to(torch.int32)
        return ranked(weights[-1])

    def _told(self, site: AttentionSite, pivot: int, ranking: Tensor | None, tokens: int) -> Tensor | None:
        """What the process of a pivot found, in all that have heads of its cluster, where no process has all of them."""
        among = site.among
        if among is None or not among.apart(self._places(site, pivot)):
            return ranking
        own = torch.full((tokens,), -1, dtype=torch.int32, device="cpu") if ranking is None else ranking
        told = among.ranks.reduce(own, "max")
        return None if int(told[0]) < 0 else told

    def weights(self, step: Step, own: AttentionSite, q: Tensor, tokens: int) -> Tensor:
        """Pooled attention float32 [W, tokens], averaged over the group, of queries q [G, W, D] of one KV head `own`, which are those of
        the last W of the row's first `tokens` tokens."""
        return _pooled_weights(logits_on(keys_of(step, own), own, q, step)[..., :tokens], self.pool)

    def satellites(self, site: AttentionSite, pivot: int) -> list[int]:
        """The KV heads of a site that follow `pivot`, of this process's."""
        followers = (head for (store, head), own in self.pivots.items() if store == site.store and own == pivot)
        return [own for own in (self.own_place(site, head) for head in followers) if own is not None]

    def own_place(self, site: AttentionSite, place: int) -> int | None:
        """Where the KV head that is at `place` in the program of all heads is in `site`; None: another process has it."""
        if site.among is None:
            return place
        head = self._head(site, place)
        return site.head_order.index(head) if head in site.head_order else None

    def alone(self, site: AttentionSite, pivot: int) -> AttentionSite | None:
        """The site of a pivot alone; None: another process has it."""
        place = self.own_place(site, pivot)
        return None if place is None else site.part(place, place + 1, 1.0)

    def _head(self, site: AttentionSite, place: int) -> int:
        """The user's model's KV head at a place of the program of all heads."""
        order = self.head_orders.get(site.store)
        return order[place] if order else place

    def _places(self, site: AttentionSite, pivot: int) -> list[int]:
        """Places of a cluster's heads before processes shared them."""
        assert site.among is not None
        cluster = [pivot, *(head for (store, head), own in self.pivots.items() if (store, own) == (site.store, pivot))]
        heads, order = [self._head(site, place) for place in cluster], site.among.order
        return [order.index(head) for head in heads] if order else heads

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def read(self, record: RowRecord, notes: dict[str, Tensor], cap: Cap) -> None:
        """What the prompt's last query ranks: each satellite's own tokens, and its pivot's baseline."""
        for site, pivot in self.sites_of_pivots:
            keys = record.keys[site.store]
            for head in self.satellites(site, pivot):
                notes[order_note(site, head)] = ranked(self._prompt_weights(record, site, head)).cpu()
            name, own = f"{site.index}.{pivot}", self.own_place(site, pivot)
            asking = 0 if own is None else site.group_size
            notes[f"pivot.queries.{name}"] = torch.zeros(asking, 0, site.key_dim, dtype=torch.float32, device="cpu")
            if own is None:
                continue
            size = self.heads.base_length(cap(record.tokens), record.tokens, keys.dtype.itemsize)
            base = self._prompt_weights(record, site, own).topk(size, sorted=False).indices
            notes[f"pivot.base.{name}"] = base.to(torch.int32).cpu()
            notes[f"pivot.checks.{name}"] = torch.zeros(2, dtype=torch.int64, device="cpu")

    def _prompt_weights(self, record: RowRecord, site: AttentionSite, head: int) -> Tensor:
        """Pooled attention float32 [n] of one KV head's last query of the prompt."""
        own, k = site.part(head, head + 1, 1.0), record.keys[site.store][head : head + 1]
        last = record.queries[site.index][own.query_heads, -1:].to(k.device)
        return _pooled_weights(attention_logits(own, last, k), self.pool)[0]

    def notes(self) -> dict[str, Note]:
        """What a row remembers: per satellite its ranking; per pivot its baseline, the queries that it has put by, and how often it looked
        and updated."""
        found: dict[str, Note] = {}
        for site, pivot in self.sites_of_pivots:
            name = f"{site.index}.{pivot}"
            found |= {order_note(site, head): Note((None,), torch.int32) for head in self.satellites(site, pivot)}
            own = self.own_place(site, pivot)
            asking = 0 if own is None else site.group_size
            found[f"pivot.queries.{name}"] = Note((asking, None, site.key_dim), torch.float32)
            if own is not None:
                found[f"pivot.base.{name}"] = Note((None,), torch.int32)
                found[f"pivot.checks.{name}"] = Note((2,), torch.int64)
        return found


def order_note(site: AttentionSite, satellite: int) -> str:
    """Under which a row remembers, and a step passes on, the ranking of a satellite, a KV head of `site`."""
    return f"satellite.order.{site.index}.{satellite}"


def ranked(weights: Tensor) -> Tensor:
    """int32 [n]: tokens by weight [n], the highest first."""
    return weights.argsort(descending=True, stable=True).to(torch.int32)


def turns(order: Tensor, end: int, recent: int) -> Tensor:
    """int64 [at least end]: the place of each token before `end` where those that an `order` int64 [n] ranks take turns with what follows
    on it, the newest first: the last `recent` of its n tokens and those after them."""
    newest = max(0, len(order) - recent)
    older = order[order < newest]
    place = 2 * (end - 1 - torch.arange(max(end, len(order)), dtype=torch.int64, device="cpu"))
    place[older] = 2 * torch.arange(len(older), dtype=torch.int64, device="cpu") + 1
    return place


def pivot_sites(program: Program, pivots: Mapping[tuple[int, int], int]) -> tuple[tuple[AttentionSite, int], ...]:
    """(site, pivot) of every site that reads a store with clusters."""
    clusters = sorted({(store, pivot) for (store, _), pivot in pivots.items()})
    return tuple((site, pivot) for site in program.sites for store, pivot in clusters if site.store == store)


Found = list[tuple[Tensor, Tensor]]
"""Keys [m, D] of one KV head, and their positions int64 [m] on the host."""


def logits_on(found: Found, site: AttentionSite, q: Tensor, step: Step) -> Tensor:
    """Logits float32 [1, G, T, n], on the host, of new queries q [G, T, D] of one KV head, `site`, on the keys of all n tokens of the
    row: computed where keys are, so that no key moves."""
    logits = torch.zeros(1, site.group_size, q.shape[1], step.tokens + len(step.ids), dtype=torch.float32, device="cpu")
    for keys, positions in found:
        logits[..., positions] = attention_logits(site, q.to(keys.device), keys[None]).cpu()
    return logits


def keys_of(step: Step, site: AttentionSite) -> Found:
    """The keys of all tokens of one KV head, `site`, of the step's site, wherever they are."""
    for memory in step.parts:
        inside = site.first_head - memory.site.first_head
        if 0 <= inside < memory.site.kv_heads:
            return tokens_of(memory, inside)
    return []


def tokens_of(memory: PartView, head: int) -> Found:
    """The keys of all tokens of one KV head of a memory, on the device and on the host."""
    found = []
    for store in (memory.kept, memory.recent):
        positions = store.positions.expand(memory.site.kv_heads, -1)[head]
        found.append((plain(store.k[head : head + 1])[0], positions.long().cpu()))
    spans = memory.spans
    if spans is not None and spans.host_tokens.length:
        places, positions = spans.waiting_places()
        found.append((spans.host_tokens.keys(head, places), positions))
    return found


def _pooled_weights(logits: Tensor, pool: int) -> Tensor:
    """Weights float32 [T, n] by the logits [1, G, T, n] of the last T queries on n tokens: averaged over the group, pooled, -1 where a
    token is later than the query."""
    tokens, n = logits.shape[2:]
    asked = torch.arange(n - tokens, n, dtype=torch.int64, device=logits.device)[:, None]
    hidden = torch.arange(n, dtype=torch.int64, device=logits.device) > asked
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1).mean(1)[0]
    return pooled(weights, pool, "mean").masked_fill(hidden, -1.0)
