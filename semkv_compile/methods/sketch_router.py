"""Which tokens a query needs, from a low-rank, low-bit code of each key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.kernels.codes import code_products
from semkv.methods.page_routers import PageRouter
from semkv.profiles.schema.codes import STEPS, encode
from semkv.runtime.components import IndexPart, Summary
from semkv.runtime.segments import Folding
from semkv.runtime.spans import FoldedSpans
from semkv.runtime.step import Step


@dataclass(frozen=True)
class SketchMaps:
    """The sketch of one run of KV heads: query [Hkv, D, r], key [Hkv, D, r], mean and std [Hkv, r], `bits` per number."""

    query: Tensor
    key: Tensor
    mean: Tensor
    std: Tensor
    bits: int

    @property
    def rank(self) -> int:
        """r, numbers per token."""
        return self.key.shape[-1]


@dataclass(frozen=True, eq=False)
class SketchRouter(PageRouter):
    """q.k from the codes alone: (q A).decode(code(k B)), per token or for the best token of a page.

    maps: by (site index, first KV head) of the parts that it serves.
    """

    maps: dict[tuple[int, int], SketchMaps]

    def _maps(self, site: AttentionSite) -> SketchMaps:
        # Sites that share a store are routed with their own queries, and the codes were made with its owner's maps.
        return self.maps[site.store, site.first_head]

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        maps = self._maps(site)
        width = -(-maps.rank * maps.bits // 8)
        return {"codes": IndexPart(site.kv_heads, width, dtype=torch.uint8, merge="never", columns=True)}

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        maps = self._maps(site)
        levels = encode(folding.k.float() @ maps.key, maps.mean, maps.std, maps.bits)
        return {"codes": pack_levels(levels, maps.bits)}

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans, step: Step) -> Tensor:
        if not step.kernels:
            return super().score(site, q, spans, step)
        from semkv.kernels.sketch_scores.triton import sketch_scores_triton

        maps, there = self._maps(site), spans.on(q.device)
        query, mean, std = (
            there.constant(f"sketch.{name}.{site.store}.{site.first_head}", x.float)
            for name, x in (("query", maps.query), ("mean", maps.mean), ("std", maps.std))
        )
        codes = there.indexed("codes")
        return sketch_scores_triton(q, query, codes, mean, std, bits=maps.bits, scale=site.scale)

    def logits(self, site: AttentionSite, q: Tensor, spans: FoldedSpans) -> Tensor:
        maps = self._maps(site)
        codes = spans.index["codes"]
        assert isinstance(codes, Tensor)
        # (q A).decode(levels), with the steps on the query's side, where there are far fewer numbers; what the means and the half steps
        # add is the same for all tokens.
        stepped = (q @ maps.query).mul_((STEPS[maps.bits] * maps.std)[:, None, :])
        if 8 % maps.bits == 0:
            return code_products(stepped, codes, maps.bits)
        return stepped @ unpack_levels(codes, maps.bits, maps.rank).float().transpose(1, 2)


def pack_levels(levels: Tensor, bits: int) -> Tensor:
    """Levels int8 [..., r] in [-2^(bits-1), 2^(bits-1)) -> uint8 [..., ceil(r * bits / 8)], the lowest bit first."""
    raised = (levels.to(torch.int16) + (1 << (bits - 1)))[..., None]
    stream = ((raised >> torch.arange(bits, dtype=torch.int16, device="cpu")) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (stream << torch.arange(8, dtype=torch.int16, device="cpu")).sum(-1).to(torch.uint8)


def unpack_levels(packed: Tensor, bits: int, rank: int) -> Tensor:
    """The levels int8 [..., rank] of `pack_levels`."""
    if 8 % bits == 0:  # codes do not straddle bytes
        parts = (packed[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu")) & ((1 << bits) - 1)
        return parts.flatten(-2)[..., :rank].to(torch.int8) - (1 << (bits - 1))
    stream = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1).flatten(-2)[
        ..., : rank * bits
    ]
    places = torch.tensor([1 << place for place in range(bits)], dtype=torch.int16, device="cpu")
    return ((stream.unflatten(-1, (rank, bits)) * places).sum(-1) - (1 << (bits - 1))).to(torch.int8)
