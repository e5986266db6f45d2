"""How relevant a folded span is to a query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.quantization import dequantize
from semkv.runtime.spans import FACTORS, FoldedSpans


@dataclass(frozen=True)
class GateRouter:
    """SeKV's trained gate (Eq. 3-5 and 9).

    With per-head projections W [Hq, d', D], a span's summary is normalise(W mean key); its logit for a query q is
    (W q).summary / sqrt(d') + log size - offset, and it is unfolded above the head's threshold.

    weights, offsets, thresholds: per site index, [Hq, d', D], [Hq] and [Hq]. shared_threshold: one threshold for all heads
    (ablation): the mean of the learned ones.
    """

    weights: dict[int, Tensor]
    offsets: dict[int, Tensor]
    thresholds: dict[int, Tensor]
    shared_threshold: bool = False

    @property
    def routing_dim(self) -> int:
        return next(iter(self.weights.values())).shape[1]

    def project(self, site: AttentionSite, k: Tensor) -> Tensor:
        """W k: keys k [Hkv, m, D] -> [Hq, m, d']."""
        return k.float().cpu().repeat_interleave(site.group_size, 0) @ self.weights[site.index].transpose(1, 2)

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans) -> Tensor:
        w = self.weights[site.index]
        query = q.float().cpu() @ w.transpose(1, 2)  # [Hq, T, d']
        size = spans.lengths.float().log()
        if spans.vectors is not None:
            raw = query @ dequantize(spans.vectors).transpose(1, 2)
        else:
            back = (query @ w).unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)  # W^T W q
            raw = (back @ dequantize(spans.mean_k).transpose(1, 2)).view(site.q_heads, q.shape[1], -1)
            raw = raw / spans.norms.float()[:, None]
        scores = raw / w.shape[1] ** 0.5 + size - self.offsets[site.index][:, None, None]
        # Heads of a group compete for the same room: what they compare is how far above its own threshold each is.
        return scores - self.thresholds[site.index][:, None, None]

    def threshold(self, site: AttentionSite) -> Tensor:
        """Zero: `score` is measured from the learned threshold."""
        own = self.thresholds[site.index]
        if not self.shared_threshold:
            return torch.zeros_like(own)
        return torch.cat(list(self.thresholds.values())).mean() - own


@dataclass(frozen=True)
class CoarseRouter:
    """No training: a span's logit is the product of the query with its mean key's direction.

    Eq. 3-4 with W the identity. The mean key that the coarse entry keeps is all that it needs; its length, which says how
    alike the span's keys are rather than what they hold, does not count.
    """

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans) -> Tensor:
        grouped = q.float().cpu().unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)
        direction = torch.nn.functional.normalize(dequantize(spans.mean_k), dim=-1)
        return (grouped @ direction.transpose(1, 2)).view(site.q_heads, q.shape[1], -1)

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.zeros(site.q_heads)


@dataclass(frozen=True)
class OracleRouter:
    """True attention chooses: a span's logit is the log of its tokens' softmax mass among all folded tokens.

    Not a method: it reads every folded key at every step. It shows what the best selection under the same segmentation and
    budget would give.
    """

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans) -> Tensor:
        if bool((spans.segment_kind == FACTORS).any()):
            raise ValueError("oracle selection reads raw tokens: use it with forms='raw' or 'int8'")
        k, _ = spans.host_tokens.all_tokens()
        unit = spans.segment_unit.repeat_interleave(spans.segment_length)
        grouped = q.float().cpu().unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)
        logits = (grouped @ k.float().transpose(1, 2)).view(site.q_heads, q.shape[1], -1) * site.scale
        if site.softcap:
            logits = site.softcap * torch.tanh(logits / site.softcap)
        weights = logits.softmax(-1) * (unit >= 0)
        mass = torch.zeros(*weights.shape[:2], spans.count).index_add_(2, unit.clamp(min=0), weights)
        return mass.clamp(min=1e-30).log()

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), -1e9)
