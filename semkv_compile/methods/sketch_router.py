"""Which tokens a query needs, from codes of their keys in residual codebooks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from semkv.ir import state_ops
from semkv.ir.site import AttentionSite
from semkv.kernels.residual_codes.cpp import residual_codes_cpp, residual_codes_here
from semkv.kernels.sketch_scores import sketch_logits
from semkv.methods.page_routers import PageRouter, ungrouped
from semkv.profiles.schema.codes import Codebooks
from semkv.runtime.components import IndexPart, Summary
from semkv.runtime.decode.units import Units
from semkv.runtime.step import Step
from semkv.runtime.store.segments import Folding
from semkv.runtime.views import UnitsView


@dataclass(frozen=True, eq=False)
class SketchRouter(PageRouter):
    """q.k from the codes alone: a sum of numbers that each byte of a code looks up in the query's tables.

    books: of keys, by (store, first KV head) of the parts that it serves. values: of values; where there are some, the tokens that stay
    folded are attended to through their codes, at a key's estimated product and a value's nearest vector.
    """

    books: dict[tuple[int, int], Codebooks] = field(default_factory=dict)
    values: dict[tuple[int, int], Codebooks] = field(default_factory=dict)

    def _books(self, site: AttentionSite) -> Codebooks:
        # Sites that share a store are routed with their own queries, and the codes were made with its owner's books.
        return self.books[site.store, site.first_head]

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        books = {"codes": self._books(site), "values": self.values.get((site.store, site.first_head))}
        return {
            name: IndexPart(site.kv_heads, own.stages, dtype=torch.uint8, merge="never")
            for name, own in books.items()
            if own is not None
        }

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        values = self.values.get((site.store, site.first_head))
        made = {"codes": _encoded(self._books(site), folding.k)}
        return made if values is None else made | {"values": _encoded(values, folding.v)}

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        if not step.kernels:
            return super().score(site, q, spans, step)
        from semkv.kernels.sketch_scores.triton import sketch_scores_triton

        books, there = self._books(site), spans.on(q.device)
        inverse, vectors = (
            there.constant(f"sketch.{name}.{site.store}.{site.first_head}", make)
            for name, make in (("inverse", lambda: books.inverse.mT), ("books", lambda: books.books.flatten(1, 2).mT))
        )
        asked = q.float().unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2) * site.scale
        tables = (asked @ inverse @ vectors).unflatten(-1, (books.stages, -1))
        return ungrouped(site, sketch_scores_triton(tables, there.indexed("codes")), q.shape[1])

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        books, values = self._books(site), self.values.get((site.store, site.first_head))
        # [H, D, R + 1] into the space of codes and to the mean's product, [H, R, S * 256] from there to what each vector adds
        found = {
            "inward": torch.cat([books.inverse.mT, books.mean[..., None]], -1),
            "vectors": books.books.flatten(1, 2).mT.contiguous(),
        }
        if values is not None:
            eye = torch.eye(site.group_size, dtype=torch.bool, device="cpu")
            found |= {"value_books": values.books, "value_mean": values.mean, "eye": eye}
        return found

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        vectors, stages = units.constant("vectors"), units.tensors["codes"].shape[-1]
        asked, of_mean = ((q * site.scale) @ units.constant("inward")).split([vectors.shape[-2], 1], -1)
        tables = (asked @ vectors).unflatten(-1, (stages, -1))
        score, mass = state_ops.scores(state_ops.look_up(tables, units.tensors["codes"]), units.count)
        if self.has_rest(site):
            units.passing["shift"] = mass + of_mean  # from a score to the logit of a token
        return score

    def has_rest(self, site: AttentionSite) -> bool:
        """See `semkv.runtime.components.Rest`."""
        return (site.store, site.first_head) in self.values and not site.has_bias

    def rest(
        self, site: AttentionSite, score: Tensor, chosen: Tensor, own: Tensor | None, units: Units
    ) -> tuple[Tensor, Tensor]:
        """See `semkv.runtime.components.Rest`."""
        books, mean = units.constant("value_books"), units.constant("value_mean")
        codes, shift = units.tensors["values"], units.passing["shift"]
        return state_ops.coarse_attention(score, shift, chosen, units.count, codes, books, mean, site.softcap, own)

    def logits(self, site: AttentionSite, q: Tensor, spans: UnitsView) -> Tensor:  # type: ignore[override]
        codes = spans.index["codes"]
        assert isinstance(codes, Tensor)
        return sketch_logits(self._books(site).tables(q), codes)

    def attend(
        self, site: AttentionSite, q: Tensor, score: Tensor, seen: Tensor, spans: UnitsView
    ) -> tuple[Tensor, Tensor] | None:
        values = self.values.get((site.store, site.first_head))
        if values is None or site.has_bias:
            return None
        tokens, device, held = q.shape[1], score.device, spans.index["codes"]
        assert isinstance(held, Tensor)
        there = spans.on(device)
        named = there.indexed("values")
        # A score is a logit but for one number per query, which the first token's own logit tells.
        first = self._books(site).decode(held[:, :1].cpu()).to(device)
        asked = q.float().to(device).unflatten(0, (site.kv_heads, site.group_size)).flatten(1, 2) * site.scale
        shift = ungrouped(site, asked @ first.mT, tokens) - score[..., :1]
        logits = score + shift
        if site.softcap:
            logits = site.softcap * torch.tanh(logits / site.softcap)
        logits = logits.masked_fill_(seen, float("-inf"))
        mass = logits.logsumexp(-1)
        weights = torch.exp_(logits.sub_(mass.clamp(min=torch.finfo(torch.float32).min)[..., None]))
        grouped_weights = weights.view(site.kv_heads, -1, held.shape[1])
        mean, books = (
            there.constant(f"sketch.value_{name}.{site.store}.{site.first_head}", make)
            for name, make in (("mean", lambda: values.mean), ("books", lambda: values.books))
        )
        return ungrouped(site, Codebooks(mean, books).average(grouped_weights, named), tokens), mass


FEW = 64
"""Vectors that a step folds, at most: PyTorch's time is that of its many calls. Those of a prompt are coded alike on every device."""


def _encoded(books: Codebooks, x: Tensor) -> Tensor:
    """Codes uint8 [H, n, S] of vectors [H, n, D]."""
    if x.shape[1] <= FEW and residual_codes_here(x, books.books):
        return residual_codes_cpp(books.inward(x), books.books, books.biases)
    return books.encode(x)
