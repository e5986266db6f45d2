"""Which tokens a query needs, from codes of their keys in residual codebooks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.kernels.sketch_scores import sketch_logits
from semkv.methods.page_routers import PageRouter, ungrouped
from semkv.profiles.schema.codes import Codebooks
from semkv.runtime.components import IndexPart, Summary
from semkv.runtime.segments import Folding
from semkv.runtime.spans import FoldedSpans
from semkv.runtime.step import Step


@dataclass(frozen=True, eq=False)
class SketchRouter(PageRouter):
    """q.k from the codes alone: a sum of numbers that each byte of a code looks up in the query's tables.

    books: by (store, first KV head) of the parts that it serves.
    """

    books: dict[tuple[int, int], Codebooks] = field(default_factory=dict)

    def _books(self, site: AttentionSite) -> Codebooks:
        # Sites that share a store are routed with their own queries, and the codes were made with its owner's books.
        return self.books[site.store, site.first_head]

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        stages = self._books(site).stages
        return {"codes": IndexPart(site.kv_heads, stages, dtype=torch.uint8, merge="never")}

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        return {"codes": self._books(site).encode(folding.k)}

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans, step: Step) -> Tensor:
        if not step.kernels:
            return super().score(site, q, spans, step)
        from semkv.kernels.sketch_scores.triton import sketch_scores_triton

        books, there = self._books(site), spans.on(q.device)
        inverse, vectors = (
            there.constant(f"sketch.{name}.{site.store}.{site.first_head}", make)
            for name, make in (("inverse", lambda: books.inverse), ("books", lambda: books.books.flatten(1, 2).mT))
        )
        asked = q.float().unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2) * site.scale
        tables = (asked @ inverse @ vectors).unflatten(-1, (books.stages, -1))
        return ungrouped(site, sketch_scores_triton(tables, there.indexed("codes")), q.shape[1])

    def logits(self, site: AttentionSite, q: Tensor, spans: FoldedSpans) -> Tensor:
        codes = spans.index["codes"]
        assert isinstance(codes, Tensor)
        return sketch_logits(self._books(site).tables(q), codes)
