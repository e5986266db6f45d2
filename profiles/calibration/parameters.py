"""SeKV's trainable parts: of each site a routing projection, offsets and thresholds; the rank gates are of all sites together."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from semkv.ir.site import AttentionSite

from .contexts import SiteRecord
from .settings import CalibrationSettings


class RouterParameters(nn.Module):
    """The router W [Hq, d', D], offset [Hq] and threshold [Hq] of one site; the last two are logits."""

    def __init__(self, site: AttentionSite, settings: CalibrationSettings) -> None:
        super().__init__()
        shape = (site.q_heads, routing_rows(site, settings), site.key_dim)
        if settings.router_init == "identity":
            start = torch.eye(*shape[1:], dtype=torch.float32, device="cpu").expand(shape).contiguous()
        else:
            generator = torch.Generator(device="cpu").manual_seed(settings.seed + site.index)
            start = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / math.sqrt(shape[2])
        logit = math.log(settings.threshold_start / (1 - settings.threshold_start))
        self.router = nn.Parameter(start)
        self.offset = nn.Parameter(torch.zeros(shape[0], dtype=torch.float32, device="cpu"))
        self.threshold = nn.Parameter(torch.full((shape[0],), logit, dtype=torch.float32, device="cpu"))

    def summaries(self, mean_k: Tensor) -> Tensor:
        """Eq. 3: mean_k [Hkv, S, D] (the surprisal-weighted means) -> unit vectors [Hq, S, d']."""
        return summaries(self.router, mean_k)

    def relevance(self, q: Tensor, mean_k: Tensor, log_size: Tensor) -> Tensor:
        """Logits of Eq. 4-5 before the offset: q [Hq, T, D], mean_k [Hkv, S, D], log_size [S] -> [Hq, T, S]."""
        routed = torch.einsum("hrd,htd->htr", self.router, q)
        return routed @ self.summaries(mean_k).mT / math.sqrt(self.router.shape[1]) + log_size

    def margins(self, record: SiteRecord) -> Tensor:
        """score - offset - threshold, [Hq, T, S]: zoomed where it is positive, and what spans are ordered by over the cap."""
        scores = self.relevance(record.q, record.mean_k, record.log_size)
        return scores - (self.offset + self.threshold)[:, None, None]

    def groups(self, settings: CalibrationSettings) -> list[dict[str, object]]:
        """AdamW's groups: thresholds and offsets move faster and do not decay towards an arbitrary zero."""
        return [
            {"params": [self.router], "factor": 1.0, "weight_decay": settings.weight_decay},
            {"params": [self.offset, self.threshold], "factor": settings.threshold_rate, "weight_decay": 0.0},
        ]


def routing_rows(site: AttentionSite, settings: CalibrationSettings) -> int:
    """d' of a site."""
    if settings.router_init == "identity":
        return site.key_dim
    return max(1, min(settings.routing_dim, site.key_dim // 2))


def summaries(router: Tensor, mean_k: Tensor) -> Tensor:
    """Eq. 3 for a router [Hq, d', D] and mean keys [Hkv, S, D]: unit vectors [Hq, S, d']."""
    grouped = router.unflatten(0, (mean_k.shape[0], -1))
    projected = torch.einsum("hgrd,hsd->hgsr", grouped, mean_k).flatten(0, 1)
    return nn.functional.normalize(projected, dim=-1)


def straight_through(logits: Tensor) -> Tensor:
    """1 where a logit is positive, else 0; gradients as of its sigmoid (Bengio et al. 2013)."""
    soft = torch.sigmoid(logits)
    return (logits > 0).to(soft.dtype) + (soft - soft.detach())
