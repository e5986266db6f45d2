"""Heads that follow another head of their layer: the pivot's attention chooses their tokens, anew when it has drifted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.routers import MeansSuffice
from semkv.methods.window_scores import attention_logits, pooled
from semkv.runtime.components import Cap, Note
from semkv.runtime.record import RowRecord
from semkv.runtime.site_memory import SiteMemory
from semkv.runtime.spans import FoldedSpans
from semkv.runtime.step import Step
from semkv.runtime.token_store import plain


@dataclass(frozen=True, eq=False)
class PivotRouter(MeansSuffice):
    """A satellite's tokens in the order in which its pivot last ranked them; units are single tokens.

    HeteroCache Sec. 4.3 and Alg. 1: every `every` steps, where the median overlap of the pivot's top sets with those of its
    baseline is below `tau_drift`, the pivot's ranking for the current query becomes its satellites' from the next step on,
    and the new baseline. A top set has as many tokens as the satellites on the mean may hold. Tokens that came after the
    ranking follow behind it, the newest first. The update is beside the step, not in its way: what a single new token's step
    unfolds is known before it, and the pivot's attention, in `stored`, changes what the next one does.

    pivots: for the satellites, by (store, KV head in the lowered program), their pivot's KV head there. pool: width of the
    average pooling of weights. retrieve: False keeps the ranking of the prompt's last query (ablation).
    sites_of_pivots: (site, pivot's KV head) of every cluster.
    """

    pivots: Mapping[tuple[int, int], int]
    every: int = 5
    tau_drift: float = 0.5
    pool: int = 5
    retrieve: bool = True
    sites_of_pivots: tuple[tuple[AttentionSite, int], ...] = ()

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans, step: Step) -> Tensor:
        orders = self.orders(step, self.pivots[site.store, site.first_head])
        at, tokens = spans.positions[0].long(), step.tokens + q.shape[1]
        rows = []
        for order in orders:
            rank = (
                len(order) + tokens - torch.arange(tokens, dtype=torch.int64, device="cpu")
            )  # those that the pivot has not ranked yet
            rank[order] = torch.arange(len(order), dtype=torch.int64, device="cpu")
            rows.append(-rank[at].float())
        return torch.stack(rows).expand(site.q_heads, -1, -1)

    def foresees(self, site: AttentionSite, step: Step) -> bool:
        """See `semkv.runtime.components.Foresight`: where a token runs alone; among several the first may change the ranking of others."""
        return len(step.ids) == 1

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), float("-inf"), dtype=torch.float32, device="cpu")

    def stored(self, step: Step) -> None:
        """The site's pivots attend, once a step; see `semkv.runtime.components.AtSite`."""
        for site, pivot in self.sites_of_pivots:
            if site.index == step.site.index:
                name = f"{site.index}.{pivot}"
                step.passing[f"pivot.{name}"] = self._follow(step, pivot, name)

    def orders(self, step: Step, pivot: int) -> list[Tensor]:
        """The ranking int64 [n] of tokens that the pivot's satellites go by, for each new query; before the site's turn that of the
        only one."""
        name = f"{step.site.index}.{pivot}"
        used = step.passing.get(f"pivot.{name}")
        return [step.notes[f"pivot.order.{name}"]] if used is None else used  # type: ignore[return-value]

    def _follow(self, step: Step, pivot: int, name: str) -> list[Tensor]:
        notes = step.notes
        order, overlaps = notes[f"pivot.order.{name}"], notes[f"pivot.overlaps.{name}"].tolist()
        checks, updates = notes[f"pivot.checks.{name}"].tolist()
        k, weights = self.set_size(step, pivot), self.weights(step, pivot)
        used = []
        for place in range(len(weights)):
            used.append(order)
            seen = weights[place, : step.tokens + place + 1]
            ranked = seen.argsort(descending=True, stable=True)
            base = order[:k]
            overlaps.append(float(torch.isin(ranked[:k], base).sum()) / min(k, len(base)))
            if len(overlaps) == self.every:
                checks += 1
                if (
                    self.retrieve
                    and float(torch.tensor(overlaps, dtype=torch.float32, device="cpu").quantile(0.5)) < self.tau_drift
                ):
                    order, updates = ranked, updates + 1
                overlaps = []
        notes[f"pivot.order.{name}"] = order
        notes[f"pivot.overlaps.{name}"] = torch.tensor(overlaps, dtype=torch.float32, device="cpu")
        notes[f"pivot.checks.{name}"] = torch.tensor([checks, updates], dtype=torch.int64, device="cpu")
        return used

    def set_size(self, step: Step, pivot: int) -> int:
        """Tokens that the pivot's satellites may hold, on the mean."""
        sizes = [
            cap / (memory.recent.kv_nbytes + 4)
            for memory, cap in zip(step.parts, step.caps)
            if self.pivots.get((memory.site.store, memory.site.first_head)) == pivot
        ]
        return max(1, int(sum(sizes) / len(sizes)))

    def weights(self, step: Step, pivot: int) -> Tensor:
        """The pivot's pooled attention float32 [T, n] on all tokens of the row, averaged over its query heads."""
        own = step.site.part(pivot, pivot + 1, 1.0)
        return _pooled_weights(logits_on(keys_of(step, own), own, step.q[own.query_heads], step), self.pool)

    def read(self, record: RowRecord, notes: dict[str, Tensor], cap: Cap) -> None:
        """The baseline: the ranking by the prompt's last query."""
        for site, pivot in self.sites_of_pivots:
            own = site.part(pivot, pivot + 1, 1.0)
            k = record.keys[site.store][pivot : pivot + 1]
            last = record.queries[site.index][own.query_heads, -1:].cpu()
            weights = _pooled_weights(attention_logits(own, last, k), self.pool)
            name = f"{site.index}.{pivot}"
            notes[f"pivot.order.{name}"] = weights[0].argsort(descending=True, stable=True)
            notes[f"pivot.overlaps.{name}"] = torch.zeros(0, dtype=torch.float32, device="cpu")
            notes[f"pivot.checks.{name}"] = torch.zeros(2, dtype=torch.int64, device="cpu")

    def notes(self) -> dict[str, Note]:
        """What a row remembers per cluster: the ranking, overlaps since the last check, and how often it checked and updated."""
        found: dict[str, Note] = {}
        for site, pivot in self.sites_of_pivots:
            name = f"{site.index}.{pivot}"
            found[f"pivot.order.{name}"] = Note((None,), torch.int64)
            found[f"pivot.overlaps.{name}"] = Note((None,), torch.float32)
            found[f"pivot.checks.{name}"] = Note((2,), torch.int64)
        return found


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


def tokens_of(memory: SiteMemory, head: int) -> Found:
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
    hidden = (
        torch.arange(n, dtype=torch.int64, device="cpu")
        > torch.arange(n - tokens, n, dtype=torch.int64, device="cpu")[:, None]
    )
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1).mean(1)[0]
    return pooled(weights, pool, "mean").masked_fill(hidden, -1.0)
