"""SeKV's trainable parts: routing projections, offsets, thresholds and rank gates."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from semkv.ir.program import Program
from semkv.methods.rank_gates import RankGates

from .settings import CalibrationSettings


class SekvParameters(nn.Module):
    """What the calibration of SeKV trains, for the sites with treatment `method`; a key of each dictionary is a site's index.

    router W [Hq, d', D]; offset [Hq] and threshold [Hq] in logits. The model itself is not in here.
    """

    def __init__(self, program: Program, settings: CalibrationSettings) -> None:
        super().__init__()
        self.router = nn.ParameterDict()
        self.offset = nn.ParameterDict()
        self.threshold = nn.ParameterDict()
        generator = torch.Generator(device="cpu").manual_seed(settings.seed)
        start = math.log(settings.threshold_start / (1 - settings.threshold_start))
        dims = []
        for site in program.sites:
            if site.treatment != "method":
                continue
            square = settings.router_init == "identity"
            dim = site.key_dim if square else max(1, min(settings.routing_dim, site.key_dim // 4))
            dims.append(dim)
            key = str(site.index)
            noise = torch.randn(site.q_heads, dim, site.key_dim, generator=generator, dtype=torch.float32, device="cpu")
            start_w = (
                torch.eye(dim, dtype=torch.float32, device="cpu").expand_as(noise)
                if square
                else noise / math.sqrt(site.key_dim)
            )
            self.router[key] = nn.Parameter(start_w.contiguous())
            self.offset[key] = nn.Parameter(torch.zeros(site.q_heads, dtype=torch.float32, device="cpu"))
            self.threshold[key] = nn.Parameter(torch.full((site.q_heads,), start, dtype=torch.float32, device="cpu"))
        again = torch.Generator(device="cpu").manual_seed(settings.seed)
        self.gates = RankGates(settings.max_rank, max(dims), settings.gate_hidden, again)

    def summaries(self, site: int, mean_k: Tensor) -> Tensor:
        """Eq. 3: mean_k [Hkv, S, D] (the surprisal-weighted means) -> unit vectors [Hq, S, d']."""
        router = self.router[str(site)]
        grouped = router.unflatten(0, (mean_k.shape[0], -1))
        projected = torch.einsum("hgrd,hsd->hgsr", grouped, mean_k).flatten(0, 1)
        return nn.functional.normalize(projected, dim=-1)

    def relevance(self, site: int, q: Tensor, summaries: Tensor, log_size: Tensor) -> Tensor:
        """Logits of Eq. 4-5 before the offset: q [Hq, T, D], summaries [Hq, S, d'], log_size [S] -> [Hq, T, S]."""
        router = self.router[str(site)]
        routed = torch.einsum("hrd,htd->htr", router, q)
        return routed @ summaries.transpose(-1, -2) / math.sqrt(router.shape[1]) + log_size

    def rank_gates(self, sigma: Tensor, summaries: Tensor, log_size: Tensor, kind: str) -> Tensor:
        """Eq. 7: sigma [Hkv, S, R], summaries [Hq, S, d'] averaged over each group -> gates [Hkv, S, R]."""
        averaged = summaries.unflatten(0, (sigma.shape[0], -1)).mean(1)
        return self.gates(sigma, averaged, log_size.expand(sigma.shape[:2]), kind)

    def groups(self, settings: CalibrationSettings) -> list[dict[str, object]]:
        """AdamW's groups: thresholds and offsets move faster and do not decay towards an arbitrary zero."""
        logits = [*self.offset.values(), *self.threshold.values()]
        rest = [*self.router.values(), *self.gates.parameters()]
        return [
            {"params": rest, "factor": 1.0, "weight_decay": settings.weight_decay},
            {"params": logits, "factor": settings.threshold_rate, "weight_decay": 0.0},
        ]


def straight_through(logits: Tensor) -> Tensor:
    """1 where a logit is positive, else 0; gradients as of its sigmoid (Bengio et al. 2013)."""
    soft = torch.sigmoid(logits)
    return (logits > 0).to(soft.dtype) + (soft - soft.detach())
