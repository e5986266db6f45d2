"""What the newest queries of a prompt say of its folded tokens: how much attention each is likely to get."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.segments import Folding


@dataclass(frozen=True)
class ExpectedAttention:
    """Of the queries [Hkv, R, D] that a prompt ends with, all query heads of a group together, to tokens that are folded.

    weights float32 [Hkv, n]: of each token, summing to 1 in each unit. mass float32 [Hkv, m]: of each unit.
    """

    site: AttentionSite
    folding: Folding
    queries: Tensor
    logits: Tensor
    weights: Tensor
    mass: Tensor

    @classmethod
    def of(cls, site: AttentionSite, folding: Folding) -> ExpectedAttention | None:
        """None where the tokens are not of a prompt, whose queries are known."""
        if folding.record is None:
            return None
        asked = folding.record.queries[site.index][site.query_heads].float().cpu()
        queries = asked.unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2)
        logits = _logits(site, queries, folding.k)
        share = logits.softmax(-1).mean(1).clamp(min=1e-20)  # [Hkv, n]
        mass = folding.sums(share[..., None])[..., 0]
        unit = folding.token_unit.expand(site.kv_heads, -1)
        weights = share / mass.gather(1, unit)
        return cls(site, folding, queries, logits, weights, mass)

    def bias(self, mean_k: Tensor) -> Tensor:
        """float32 [Hkv, m]: what is added to the logit of a unit's mean key [Hkv, m, D], so that on the mean over the queries it is the
        logarithm of what the unit's tokens weigh together in the softmax."""
        top = self.logits.amax(-1, keepdim=True)
        parts = self.folding.sums((self.logits - top).exp().transpose(1, 2)).transpose(1, 2)  # [Hkv, R, m]
        together = parts.clamp(min=1e-30).log() + top
        return (together - _logits(self.site, self.queries, mean_k)).mean(1)


def _logits(site: AttentionSite, q: Tensor, k: Tensor) -> Tensor:
    logits = q @ k.float().transpose(1, 2) * site.scale
    return site.softcap * torch.tanh(logits / site.softcap) if site.softcap else logits
