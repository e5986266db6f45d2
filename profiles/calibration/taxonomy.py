"""HeteroCache's calibration (Sec. 3, App. C): stability and similarity of KV heads, and the roles that follow."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.profiles.schema import HeadTaxonomy
from semkv.profiles.schema.roles import head_roles

from .interpreter import SiteCall, full_attention
from .measure import Measure, Outcome, Sums, agreed, reliability
from .weights import group_mean, smoothed, weight_blocks


def top_sets(weights: Tensor, first: int, k: int, pool: int) -> Tensor:
    """Top-k sets of KV heads: weights [Hkv, b, n] of queries first, first + 1, ... -> bool [Hkv, b, n].

    Weights are average-pooled first; a set holds no token behind its query.
    """
    pooled = smoothed(weights, pool)
    places = torch.arange(weights.shape[-1], dtype=torch.int64, device=weights.device)
    queries = first + torch.arange(weights.shape[1], dtype=torch.int64, device=weights.device)
    pooled = pooled.masked_fill(places > queries[:, None], -1.0)
    return torch.zeros_like(pooled, dtype=torch.bool).scatter(-1, pooled.topk(k, -1).indices, True)


def step_overlaps(call: SiteCall, context: int, k: int, pool: int, block: int) -> tuple[Tensor, Tensor]:
    """Overlap (Eq. 1) of each decode step's sets with those of the prompt's last query, and of heads with each other.

    call: all tokens of a sample, `context` of them the prompt. Returns [steps, Hkv] and [steps, Hkv, Hkv].
    """
    kv_heads = call.k.shape[0]
    base: Tensor | None = None
    drift, pairs = [], []
    for start, weights in weight_blocks(call, context - 1, block):
        sets = top_sets(group_mean(weights, kv_heads), start, k, pool)
        if base is None:
            base, sets = sets[:, :1], sets[:, 1:]
        drift.append((sets & base).sum(-1).float().T / k)
        each = sets.transpose(0, 1).float()
        pairs.append(each @ each.transpose(1, 2) / k)
    return torch.cat(drift), torch.cat(pairs)


def stability(drift: Tensor) -> Tensor:
    """Eq. 2: median over steps of the overlap with the prompt's set, [steps, Hkv] -> [Hkv]."""
    return torch.quantile(drift, 0.5, dim=0)


def similarity(pairs: Tensor) -> Tensor:
    """Eq. 3: median over steps of the best overlap with another head, [steps, Hkv, Hkv] -> [Hkv]; 0 for a lone head."""
    heads = pairs.shape[-1]
    if heads == 1:
        return torch.zeros(1, dtype=torch.float32, device="cpu")
    itself = torch.eye(heads, dtype=torch.bool, device=pairs.device)
    return torch.quantile(pairs.masked_fill(itself, -1.0).amax(-1), 0.5, dim=0)


def set_size(context: int, share: float) -> int:
    """k for a context: the paper's 1K of 10K tokens, scaled to its length."""
    return max(1, round(share * context))


class Taxonomy(Measure):
    """Roles of KV heads. Of a store that several sites read, the first site's attention counts."""

    name = "taxonomy"
    field = "head_taxonomy"
    prefix = "taxonomy."

    @property
    def units(self) -> int:
        return len(self.subject.data.measured)

    def measure(self, unit: int, sums: Sums) -> None:
        """One sample: a pass in which each layer's attention of the decode steps is looked at in blocks."""
        name, ids = self.subject.data.measured[unit]
        context = len(ids) - self.settings.steps
        k = set_size(context, self.settings.top_share)
        stores = {site.index: site.store for site in self.subject.owners}
        odd = unit // len(self.subject.data.sets) % 2  # so that both halves are of all data sets

        def look(call: SiteCall) -> Tensor:
            if call.site in stores:
                drift, pairs = step_overlaps(call, context, k, self.settings.pool, self.settings.block)
                place = f"{name}.{stores[call.site]}"
                sums.add(f"stability.{place}", stability(drift))
                sums.add(f"similarity.{place}", similarity(pairs))
                sums.add(f"overlap.{place}", torch.quantile(pairs, 0.5, dim=0))
                if odd:
                    sums.add(f"odd.stability.{stores[call.site]}", stability(drift))
                    sums.add(f"odd.overlap.{stores[call.site]}", torch.quantile(pairs, 0.5, dim=0))
            return full_attention(call)

        self.subject.run(ids, look)
        sums.add(f"count.{name}", 1.0)
        sums.add("odd.count", float(odd))

    def agreement(self, sums: Sums) -> float | None:
        """Of the figures that roles are made from: stability, and overlap of heads."""
        names = [name for name in self.subject.data.set_names if sums.get(f"count.{name}") is not None]
        count = sum(float(sums[f"count.{name}"]) for name in names)
        odd = float(sums["odd.count"])
        if not 0 < odd < count:
            return None
        halves: tuple[list[Tensor], list[Tensor]] = ([], [])
        for site in self.subject.owners:
            for what in ("stability", "overlap"):
                total = torch.stack([sums[f"{what}.{name}.{site.store}"] for name in names]).sum(0)
                half = sums[f"odd.{what}.{site.store}"]
                for place, values in enumerate(((total - half) / (count - odd), half / odd)):
                    halves[place].append(values.flatten())
        return reliability(torch.cat(halves[0]), torch.cat(halves[1]))

    def finish(self, sums: Sums) -> Outcome:
        """Means over all samples, and the roles that they make; the roles of each data set alone for comparison."""
        names = [name for name in self.subject.data.set_names if sums.get(f"count.{name}") is not None]
        stores = {site.store for site in self.subject.owners}
        whole = self._roles(sums, names)
        roles, clusters, stable, similar, tensors = [], [], [], [], {}
        for site in self.subject.program.stores:
            store, heads = site.store, site.kv_heads
            if store in stores:
                roles.append(whole[store][0])
                clusters.append(whole[store][1])
                stable.append(_row(self._mean(sums, "stability", names, store)))
                similar.append(_row(self._mean(sums, "similarity", names, store)))
                tensors[f"taxonomy.overlap.{store}"] = self._overlap(sums, names, store).float()
            else:
                roles.append(("anchor",) * heads)
                clusters.append(tuple(range(heads)))
                stable.append((1.0,) * heads)
                similar.append((0.0,) * heads)
        section = HeadTaxonomy(
            roles=tuple(roles),
            clusters=tuple(clusters),
            stability=tuple(stable),
            similarity=tuple(similar),
            tau_stable=self.settings.tau_stable,
            tau_similar=self.settings.tau_similar,
            top_share=self.settings.top_share,
            pool=self.settings.pool,
            steps=self.settings.steps,
            samples=int(sum(float(sums[f"count.{name}"]) for name in names)),
            transfer={name: _kept_satellites(whole, self._roles(sums, [name])) for name in names},
        )
        return Outcome(section, tensors, agreed(self.agreement(sums)))

    def _mean(self, sums: Sums, what: str, names: list[str], store: int) -> Tensor:
        total = torch.stack([sums[f"{what}.{name}.{store}"] for name in names]).sum(0)
        return total / torch.stack([sums[f"count.{name}"] for name in names]).sum()

    def _overlap(self, sums: Sums, names: list[str], store: int) -> Tensor:
        overlap = self._mean(sums, "overlap", names, store)
        return (overlap + overlap.T) / 2

    def _roles(self, sums: Sums, names: list[str]) -> dict[int, tuple[tuple, tuple[int, ...]]]:
        made = {}
        for site in self.subject.owners:
            stable = _row(self._mean(sums, "stability", names, site.store))
            # The stored figures decide, so that the profile's own tensors lead to its roles.
            overlap = self._overlap(sums, names, site.store).float().tolist()
            made[site.store] = head_roles(stable, overlap, self.settings.tau_stable, self.settings.tau_similar)
        return made


def _row(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values.clamp(0, 1).tolist())


def _kept_satellites(whole: dict[int, tuple], alone: dict[int, tuple]) -> float:
    """Share of the satellites of all data that are satellites in one data set alone; 1 where there are none."""
    satellites = [(store, head) for store, made in whole.items() for head, r in enumerate(made[0]) if r == "satellite"]
    kept = sum(alone[store][0][head] == "satellite" for store, head in satellites)
    return kept / len(satellites) if satellites else 1.0
