"""How relevant a folded span is to a query."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir import state_ops
from semkv.ir.site import AttentionSite
from semkv.runtime.components import Brought, IndexPart, Summary
from semkv.runtime.decode.units import Units
from semkv.runtime.step import Step
from semkv.runtime.store.device_index import log_sizes
from semkv.runtime.store.quantization import Quantized, norms, products
from semkv.runtime.store.segments import Folding
from semkv.runtime.store.tables import FACTORS
from semkv.runtime.views import UnitsView


class MeansSuffice:
    """A router that reads nothing on the device but the units' means, if that."""

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        return {}

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        return {}

    def rebuild(self, site: AttentionSite, name: str, mean_k: Tensor) -> Tensor:
        raise ValueError(f"no index {name!r} to rebuild")


def own_heads(site: AttentionSite, x: Tensor) -> Tensor:
    """Of x [Hq, ...] for the query heads of the user's model, those of the site, in its order."""
    if not site.head_order:
        return x
    return x.unflatten(0, (-1, site.group_size))[list(site.head_order)].flatten(0, 1)


@dataclass(frozen=True)
class GateRouter:
    """SeKV's trained gate (Eq. 3-5 and 9).

    With per-head projections W [Hq, d', D], a span's summary is normalise(W mean key); its logit for a query q is
    (W q).summary / sqrt(d') + log size - offset, and it is unfolded above the head's threshold. What it is compared with is the sum of
    offset and threshold: the head's limit.

    weights, offsets, thresholds: per site index, [Hq, d', D], [Hq] and [Hq]. shared_threshold: one limit for all heads of all layers
    (ablation): the mean of the learned ones.
    """

    weights: dict[int, Tensor]
    offsets: dict[int, Tensor]
    thresholds: dict[int, Tensor]
    shared_threshold: bool = False

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        """Norms of the projected mean keys, from which summaries follow; own vectors where they are mean-pooled."""
        if summary is not None and summary.routing == "uniform":
            bits = None if summary.bits == 16 else summary.bits
            return {"vectors": IndexPart(site.q_heads, self.weights[site.index].shape[1], bits=bits)}
        return {"norms": IndexPart(site.q_heads, 1, merge="rebuild")}

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        if mean_k is None:
            raise ValueError("the trained gate routes by the units' summaries")
        pooled = self._project(site, folding.cut.mean(folding.k))
        return {
            "norms": self._norms(self._project(site, mean_k)),
            "vectors": pooled,  # normalised where they are read: so they merge to the mean of all of their tokens
        }

    def rebuild(self, site: AttentionSite, name: str, mean_k: Tensor) -> Tensor:
        """Norms for the mean keys [Hkv, m, D] of merged units."""
        return self._norms(self._project(site, mean_k))

    def _project(self, site: AttentionSite, k: Tensor) -> Tensor:
        """W k: keys k [Hkv, m, D] -> [Hq, m, d']."""
        return k.float().repeat_interleave(site.group_size, 0) @ self._weight(site).to(k.device).transpose(1, 2)

    def _weight(self, site: AttentionSite) -> Tensor:
        return self.weights[site.index][site.query_heads]

    @staticmethod
    def _norms(vectors: Tensor) -> Tensor:
        return vectors.norm(dim=-1, keepdim=True).clamp(1e-4, 6e4)

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        if step.kernels and "norms" in spans.index and isinstance(spans.mean_k, Quantized):
            return self._score_there(site, q, spans)
        w = self._weight(site)
        query = q.float().cpu() @ w.transpose(1, 2)  # [Hq, T, d']
        size = log_sizes(spans.lengths, site)
        if "vectors" in spans.index:
            length = norms(spans.index["vectors"]).clamp(min=1e-12)
            raw = spans.products(query, "vectors") / length[:, None]
        else:
            back = (query @ w).unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)  # W^T W q
            raw = products(back, spans.mean_k).reshape(site.q_heads, q.shape[1], -1)
            raw = raw / spans.indexed("norms").transpose(1, 2)
        # Heads of a group compete for the same room: what they compare is how far above its own limit each is.
        return raw / w.shape[1] ** 0.5 + size - self._limit(site)[:, None, None]

    def _limit(self, site: AttentionSite) -> Tensor:
        """[Hq]: above which score before the offset each head unfolds."""
        if self.shared_threshold:
            limits = [self.offsets[index] + self.thresholds[index] for index in self.weights]
            return torch.cat(limits).mean().expand(site.q_heads)
        return (self.offsets[site.index] + self.thresholds[site.index])[site.query_heads]

    def _score_there(self, site: AttentionSite, q: Tensor, spans: UnitsView) -> Tensor:
        """The same by the kernel, on the device of the queries."""
        from semkv.kernels.gate_scores.triton import gate_scores_triton

        there = spans.on(q.device)
        place = f"{site.index}.{site.first_head}"
        mean = there.mean_k
        assert isinstance(mean, Quantized)
        return gate_scores_triton(
            q,
            there.constant(f"gate.weight.{place}", self._weight(site).float),
            mean.codes,
            mean.scale,
            there.indexed("norms"),
            there.lengths,
            there.constant(f"gate.limit.{place}", lambda: self._limit(site).float().contiguous()),
            there.constant(f"gate.zero.{place}", lambda: torch.zeros_like(self._limit(site).float()).contiguous()),
            bits=mean.bits,
        )

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        sizes = (site.kv_heads, site.group_size)
        return {
            "weight": self._weight(site).float().unflatten(0, sizes),
            "limit": self._limit(site).float().unflatten(0, sizes),
        }

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        w, limit = units.constant("weight"), units.constant("limit")
        query = (q[:, :, :, None] @ w.mT)[:, :, :, 0]  # [B, Hkv, G, d']
        size = units.tensors["lengths"].float().log()[:, :, None]
        if "vector_length" in units.tensors:
            raw = units.products(query.flatten(1, 2)[:, :, None], "vectors").view(*query.shape[:3], -1)
            raw = raw / units.tensors["vector_length"].view(*query.shape[:3], -1)
        else:
            back = (query[:, :, :, None] @ w)[:, :, :, 0]  # W^T W q
            raw = units.products(back, "mean_k") / units.tensors["norms"].view(*query.shape[:3], -1)
        return raw / w.shape[2] ** 0.5 + size - limit[..., None]

    def derived(self, spans: UnitsView) -> dict[str, Quantized | Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        if "vectors" not in spans.index:
            return {}
        return {"vector_length": norms(spans.index["vectors"]).clamp(min=1e-12)}

    def threshold(self, site: AttentionSite) -> Tensor:
        """Zero: `score` is measured from the limit."""
        return torch.zeros(site.q_heads, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class CoarseRouter(MeansSuffice):
    """No training: a span's logit is the product of the query with its mean key's direction.

    Eq. 3-4 with W the identity. The mean key that the coarse entry keeps is all that it needs; its length, which says how
    alike the span's keys are rather than what they hold, does not count.
    """

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        grouped = q.float().cpu().unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)
        return products(grouped, spans.mean_directions).reshape(site.q_heads, q.shape[1], -1)

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        return {}

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        return units.products(q, "direction")

    def derived(self, spans: UnitsView) -> dict[str, Quantized | Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        return {"direction": spans.mean_directions}

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.zeros(site.q_heads, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class OracleRouter(MeansSuffice):
    """True attention chooses: a span's logit is the log of its tokens' softmax mass among all folded tokens.

    Not a method: it reads every folded key at every step. It shows what the best selection under the same segmentation and
    budget would give.
    """

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        if bool((spans.tables.segment_kind == FACTORS).any()):
            raise ValueError("oracle selection reads raw tokens: use it with forms='raw' or 'int8'")
        unit = spans.tables.segment_unit.repeat_interleave(spans.tables.segment_length, dim=1)  # [Hkv|1, n]
        places = torch.arange(spans.host_tokens.length, dtype=torch.int64, device="cpu")[
            -unit.shape[1] :
        ]  # without those of retired segments
        k = torch.stack([spans.host_tokens.keys(head, places).cpu() for head in range(site.kv_heads)])
        grouped = q.float().cpu().unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)
        logits = (grouped @ k.float().transpose(1, 2)).view(site.q_heads, q.shape[1], -1) * site.scale
        if site.softcap:
            logits = site.softcap * torch.tanh(logits / site.softcap)
        unit = unit.expand(site.kv_heads, -1).repeat_interleave(site.group_size, 0)[:, None].expand(logits.shape)
        weights = logits.softmax(-1) * (unit >= 0)
        mass = torch.zeros(*weights.shape[:2], spans.count, dtype=torch.float32, device="cpu").scatter_add_(
            2, unit.clamp(min=0), weights
        )
        return mass.clamp(min=1e-30).log()

    @property
    def of_tokens(self) -> bool:
        """See `semkv.runtime.components.OfTokens`."""
        return True

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        return {}

    def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
        """See `semkv.runtime.components.Bringer`: scores are of all places where tokens wait."""
        skipped = spans.places.start
        return Brought({"first": torch.tensor([skipped], dtype=torch.int64, device="cpu")}, skipped)

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        logits = units.products(q * site.scale, "waiting.k")
        logits = site.softcap * torch.tanh(logits / site.softcap) if site.softcap else logits
        before = torch.ones_like(logits, dtype=torch.int64).cumsum(-1) <= units.tensors["first"].view(-1, 1, 1, 1)
        return (
            state_ops.scores(logits.masked_fill(before, float("-inf")), units.count)[0]
            .clamp(min=math.log(1e-30))
            .masked_fill(before, float("-inf"))
        )

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), -1e9, dtype=torch.float32, device="cpu")
