"""What tells whether a query needs a page: bounds of its keys, their mean, or a few of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir import state_ops
from semkv.ir.site import AttentionSite
from semkv.kernels.log_softmax import log_softmax
from semkv.runtime.components import IndexPart, Summary
from semkv.runtime.decode.units import Units
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.step import Step
from semkv.runtime.store.segments import Folding
from semkv.runtime.views import UnitsView


def grouped(site: AttentionSite, q: Tensor) -> Tensor:
    """Queries [Hq, T, D] -> float32 [Hkv, group * T, D] on the host, so that a KV head's index is read once for its group."""
    return q.float().cpu().unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)


def ungrouped(site: AttentionSite, x: Tensor, tokens: int) -> Tensor:
    """[Hkv, group * T, M] -> [Hq, T, M]."""
    return x.view(site.q_heads, tokens, -1)


class PageRouter(ABC):
    """Scores are log-probabilities over the units, so that the query heads of a group can be compared."""

    def rebuild(self, site: AttentionSite, name: str, mean_k: Tensor) -> Tensor:
        raise ValueError(f"the index {name!r} merges by itself")

    @abstractmethod
    def logits(self, site: AttentionSite, q: Tensor, spans: UnitsView | Units) -> Tensor:
        """Unnormalised scores [..., Hkv, R, M] of grouped queries [..., Hkv, R, D], to which they are linear, but for a number
        that is the same for all units of a query. A tensor of its own: it is written over."""

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        return {}

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        return state_ops.scores(self.logits(site, q * site.scale, units), units.count)[0]

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        logits = self.logits(site, grouped(site, q) * site.scale, spans)
        return ungrouped(site, log_softmax(logits), q.shape[1])

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), float("-inf"), dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class MinMaxRouter(PageRouter):
    """Quest's upper bound of q.k in a page: sum_d max(q_d min_d, q_d max_d) (Tang et al., 2024, Sec. 3.3).

    bits: of the bounds on the device, 4, 8, or 16 for half precision.
    """

    bits: int = 8

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        bits = None if self.bits == 16 else self.bits
        return {
            "low": IndexPart(site.kv_heads, site.key_dim, bits=bits, merge="min"),
            "high": IndexPart(site.kv_heads, site.key_dim, bits=bits, merge="max"),
        }

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        k = folding.k.float()
        return {"low": folding.cut.smallest(k), "high": folding.cut.largest(k)}

    def logits(self, site: AttentionSite, q: Tensor, spans: UnitsView | Units) -> Tensor:
        return spans.products(q.clamp(min=0), "high") + spans.products(q.clamp(max=0), "low")


@dataclass(frozen=True)
class MeanKeyRouter(PageRouter):
    """The product of the query with the mean of a unit's keys: ShadowKV's landmarks, ClusterKV's centroids.

    bits: of the means on the device, 4, 8, or 16 for half precision. direction: normalise means to length 1.
    """

    bits: int = 8
    direction: bool = False

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        return {"mean": IndexPart(site.kv_heads, site.key_dim, bits=None if self.bits == 16 else self.bits)}

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        mean = folding.cut.mean(folding.k)
        return {"mean": torch.nn.functional.normalize(mean, dim=-1) if self.direction else mean}

    def logits(self, site: AttentionSite, q: Tensor, spans: UnitsView | Units) -> Tensor:
        return spans.products(q, "mean")


@dataclass(frozen=True)
class RepresentativeRouter(PageRouter):
    """InfLLM's relevance of a block: the sum of q.k over its `count` most representative tokens (Xiao et al., 2024).

    A token represents its block by what the next `local` queries give it: r_m = mean_j q_{m+j}.k_m, heads of a group
    averaged. Tokens that left the window in generation have no queries recorded; their own keys' products stand in.
    bits: of the keys on the device, 4, 8, or 16 for half precision.
    """

    count: int = 4
    local: int = 32
    bits: int = 8

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        bits = None if self.bits == 16 else self.bits
        return {
            f"key{place}": IndexPart(site.kv_heads, site.key_dim, bits=bits, merge="mean")
            for place in range(self.count)
        }

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        k = folding.k.float()
        if folding.record is not None:
            scores = self._prompt_scores(site, folding.record)[:, folding.shared.positions].to(k.device)
        else:
            scores = (k * k.mean(1, keepdim=True)).sum(-1)
        lengths = folding.cut.lengths
        place = torch.arange(int(folding.shared.lengths.max()), dtype=torch.int64, device=k.device)
        at = (lengths.cumsum(0) - lengths)[:, None] + place
        inside = place < lengths[:, None]
        padded = torch.where(inside, scores[:, at.clamp(max=k.shape[1] - 1)], float("-inf"))  # [Hkv, M, L]
        best = padded.topk(min(self.count, len(place)), dim=-1).indices
        best = torch.minimum(best, (lengths - 1)[None, :, None])  # short blocks repeat their last token
        best = torch.nn.functional.pad(best, (0, self.count - best.shape[-1]), mode="replicate")
        token = best + (lengths.cumsum(0) - lengths)[None, :, None]
        heads = torch.arange(k.shape[0], dtype=torch.int64, device=k.device)[:, None]
        return {f"key{place}": k[heads, token[..., place]] for place in range(self.count)}

    def _prompt_scores(self, site: AttentionSite, record: RowRecord) -> Tensor:
        """`representative_scores` of the whole prompt, which the record keeps."""
        name = f"representative.{site.index}.{site.first_head}.{site.kv_heads}.{self.local}"
        if name not in record.known:
            record.known[name] = representative_scores(site, record, self.local).cpu()
        return record.known[name]

    def logits(self, site: AttentionSite, q: Tensor, spans: UnitsView | Units) -> Tensor:
        return torch.stack([spans.products(q, f"key{place}") for place in range(self.count)]).sum(0)


def representative_scores(site: AttentionSite, record: RowRecord, local: int) -> Tensor:
    """Mean of q_{m+1..m+local}.k_m over the queries that follow each token, [Hkv, n]; 0 where none follows."""
    k = record.keys[site.store][site.first_head : site.first_head + site.kv_heads].float()
    q = record.queries[site.index][site.query_heads].float().to(k.device)
    n = k.shape[1]
    mean = q.unflatten(0, (site.kv_heads, site.group_size)).mean(1)
    total = torch.nn.functional.pad(mean.cumsum(1), (0, 0, 1, 0))  # [Hkv, n + 1, D]
    ends = (torch.arange(n, dtype=torch.int64, device=k.device) + 1 + local).clamp(max=n)
    starts = (torch.arange(n, dtype=torch.int64, device=k.device) + 1).clamp(max=n)
    following = (total[:, ends] - total[:, starts]) / (ends - starts).clamp(min=1)[:, None]
    return (following * k).sum(-1)
