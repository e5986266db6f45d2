"""Tokens found through clusters of their keys, each KV head with its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.options import Count, IndexBits, Share, Tokens, TokensOrNone
from semkv.methods.page_routers import MeanKeyRouter
from semkv.methods.pages import DEFAULT_FRAME, Frame, Framed
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.segments import Segmentation


@dataclass(frozen=True)
class KeyClusters(Framed):
    """Clusters of keys by cosine, per KV head: k-means with evenly spaced first centroids, so that it repeats exactly.

    tokens_per_cluster: their mean size; larger where the index of that many does not fit. rounds: of k-means.
    """

    tokens_per_cluster: int = 80
    rounds: int = 8
    frame: Frame = DEFAULT_FRAME

    per_store: ClassVar[bool] = True
    per_head: ClassVar[bool] = True

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        first, recent, left = self.frame.fit(record.tokens, room, page_size)
        tokens = recent - first
        if tokens <= 0:
            return Segmentation(
                torch.arange(first, dtype=torch.int64, device="cpu"),
                torch.empty(0, dtype=torch.int64, device="cpu"),
                torch.empty(0, dtype=torch.int64, device="cpu"),
                recent,
            )
        most = max(1, int(left / unit_cost)) if unit_cost > 0 else tokens
        count = min(most, max(1, round(tokens / self.tokens_per_cluster)), tokens)
        k = record.keys[store.store][store.first_head : store.first_head + store.kv_heads, first:recent]
        units = cluster(k.float(), count, self.rounds)
        starts = torch.arange(first, recent, dtype=torch.int64, device="cpu")
        return Segmentation(
            torch.arange(first, dtype=torch.int64, device="cpu"), starts, torch.ones_like(starts), recent, units
        )

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        count = max(1, round(len(ids) / self.tokens_per_cluster))
        return Segmentation.of_lengths(
            torch.ones(len(ids), dtype=torch.int64, device="cpu"), cluster(k.float(), count, self.rounds)
        )


def cluster(k: Tensor, count: int, rounds: int) -> Tensor:
    """Spherical k-means of keys k [H, n, D] into at most `count` clusters per head -> units int64 [H, n], on the host.

    Every head's clusters are numbered 0, 1, ... without gaps, by their first token; heads may have fewer than `count`.
    """
    heads, n, _ = k.shape
    unit = torch.nn.functional.normalize(k, dim=-1)
    centroids = unit[:, torch.linspace(0, n - 1, count, dtype=torch.float32, device="cpu").round().long()]
    nearest = torch.zeros(heads, n, dtype=torch.int64, device=k.device)
    for _ in range(rounds):
        nearest = (unit @ centroids.transpose(1, 2)).argmax(-1)
        total = torch.zeros_like(centroids).scatter_add_(1, nearest[..., None].expand_as(unit), unit)
        empty = total.norm(dim=-1, keepdim=True) == 0
        centroids = torch.where(empty, centroids, torch.nn.functional.normalize(total, dim=-1))
    return torch.stack([_numbered(row) for row in nearest.cpu()])


def _numbered(labels: Tensor) -> Tensor:
    """Labels [n] renamed 0, 1, ... in the order of their first appearance."""
    kept, inverse = torch.unique(labels, return_inverse=True)
    first = torch.full((len(kept),), len(labels), dtype=torch.int64, device="cpu").scatter_reduce_(
        0, inverse, torch.arange(len(labels), dtype=torch.int64, device="cpu"), "amin"
    )
    return first.argsort().argsort()[inverse]


@dataclass(frozen=True)
class ClusterKV(Method):
    """ClusterKV (Liu et al., 2024): semantic clusters of keys; those with the best centroids are recalled token by token.

    tokens_per_cluster: 80 in the paper (clusters are n / 80). rounds: of k-means. bits: of centroids, 4, 8 or 16. sinks: first
    tokens, exact, 16 in the paper. window: recent tokens, exact, clustered `fold_chunk` at a time when they leave it (320 in
    the paper, where nothing bounds the device). fixed_share: of the budget, for all but recalled tokens.
    """

    tokens_per_cluster: Tokens = 80
    rounds: Count = 8
    bits: IndexBits = 8
    sinks: TokensOrNone = 16
    window: Tokens = 64
    fold_chunk: Tokens = 32
    fixed_share: Share = 1 / 2

    name: ClassVar[str] = "clusterkv"
    minimum_tokens: ClassVar[int] = 96

    def components(self, program: Program, profile: Profile | None) -> Components:
        frame = Frame(self.sinks, self.window, fold_chunk=self.fold_chunk)
        return Components(
            segmenter=KeyClusters(self.tokens_per_cluster, self.rounds, frame),
            router=MeanKeyRouter(self.bits),
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=64,
            window=self.window,
            window_share=frame.share,
            fold_chunk=self.fold_chunk,
            unit=self.tokens_per_cluster,
        )
