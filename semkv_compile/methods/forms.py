"""In which form a folded span waits: as tokens, or as the low-rank factors of its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.kernels.low_rank import randomized_svd
from semkv.runtime.store.quantization import bytes_per_vector

RankGates = Callable[[AttentionSite, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(site, key spectrum [H, m, R], value spectrum, mean key [Hkv, m, D], lengths [m]) -> gates of keys and of values [H, m, r], r <= R, of
the first components."""


@dataclass(frozen=True)
class LowRankForms:
    """Truncated SVD of each span's keys and values, per KV head (SeKV Eq. 6-8).

    max_rank: R, the most components. gates: learned rank gates; components with a gate below `gate_floor` are dropped and
    the others scaled by it. Without gates, and among components beyond those that the gates know, the fewest within `tolerance`
    (relative Frobenius error) are kept.
    only_if_smaller: a span is factored where its factors are within `tolerance` and take fewer bytes than its tokens in
    `host_form`; False factors every span, as the paper does. Bytes are those of the dtype that keys and values have.
    """

    max_rank: int = 32
    gates: RankGates | None = None
    gate_floor: float = 0.1
    tolerance: float = 0.02
    only_if_smaller: bool = True
    host_form: str = "int8"

    def factorize_spans(
        self, site: AttentionSite, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, mean_k: Tensor
    ) -> dict[int, list[dict[str, Tensor]]]:
        """See `semkv.runtime.components.FormChooser`."""
        longest = int(lengths.max())
        place = torch.arange(longest, dtype=torch.int64, device="cpu")
        index = (starts[:, None] + place).clamp(max=k.shape[1] - 1).to(k.device)
        inside = (place < lengths[:, None])[None, ..., None].to(k.device)
        keys, values = (torch.where(inside, x.float()[:, index], 0.0) for x in (k, v))  # [Hkv, m, L, D]
        candidates = torch.arange(len(lengths), dtype=torch.int64, device="cpu")
        if self.only_if_smaller:
            candidates = self._worth_trying(site, keys, values, lengths, k.dtype.itemsize)
            if not len(candidates):
                return {}
        keys, values, lengths = keys[:, candidates].cpu(), values[:, candidates].cpu(), lengths[candidates]
        parts = [randomized_svd(x, self.max_rank) for x in (keys, values)]
        gates = self._gates(site, parts, keys, values, mean_k[:, candidates], lengths)
        out: dict[int, list[dict[str, Tensor]]] = {}
        for number, span in enumerate(candidates.tolist()):
            heads = []
            for head in range(site.kv_heads):
                packed = {}
                for side, (u, s, vt), gate in zip(("key", "value"), parts, gates):
                    m = gate[head, number]
                    keep = m >= self.gate_floor if self.gates is not None else m > 0
                    keep = keep & (s[head, number] > 0)
                    keep[0] = True
                    packed[f"{side}_u"] = u[head, number, : int(lengths[number])][:, keep]
                    packed[f"{side}_s"] = (s[head, number] * m)[keep]
                    packed[f"{side}_v"] = vt[head, number][:, keep]
                heads.append(packed)
            out[span] = heads
        return out

    def _gates(
        self, site: AttentionSite, parts, keys: Tensor, values: Tensor, mean_k: Tensor, lengths: Tensor
    ) -> list[Tensor]:
        energies = [x.square().sum((-1, -2)) for x in (keys, values)]
        kept = [_kept_components(s, energy, self.tolerance) for (_, s, _), energy in zip(parts, energies)]
        if self.gates is None:
            return kept
        learned = self.gates(site, parts[0][1], parts[1][1], mean_k, lengths)
        return [torch.cat([own, rest[..., own.shape[-1] :]], -1) for own, rest in zip(learned, kept)]

    def _worth_trying(
        self, site: AttentionSite, keys: Tensor, values: Tensor, lengths: Tensor, itemsize: int
    ) -> Tensor:
        """Spans whose factors at the tolerated error are smaller than their tokens, over all heads; `itemsize`: bytes of a number. Most are
        ruled out where keys and values are, without a decomposition."""
        sides = []
        for x, dim in ((keys, site.key_dim), (values, site.value_dim)):
            gram = x @ x.transpose(-1, -2) if x.shape[2] <= dim else x.transpose(-1, -2) @ x
            energy = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
            # Of a rank's eigenvalue no more than the norm of all: where that is too little, one rank is not enough.
            alone = gram.flatten(-2).norm(dim=-1) >= (1 - self.tolerance**2 - 1e-5) * energy
            each = bytes_per_vector(dim, 8) if self.host_form == "int8" else dim * itemsize
            sides.append(
                (gram, energy, (2 - alone.int()).cpu(), (lengths + dim + 1) * itemsize, each * lengths * site.kv_heads)
            )
        tokens = torch.stack([own for *_, own in sides]).sum(0)
        fewest = torch.stack([(least * size).sum(0) for _, _, least, size, _ in sides]).sum(0)
        tried = torch.nonzero(fewest < tokens)[:, 0]
        if not len(tried):
            return tried
        numbers = torch.zeros(len(tried), dtype=torch.float32, device="cpu")
        for gram, energy, _, size, _ in sides:
            s = torch.linalg.eigvalsh(gram[:, tried].cpu()).flip(-1)[..., : self.max_rank].clamp(min=0).sqrt()
            own = energy[:, tried].cpu()
            rank = _kept_components(s, own, self.tolerance).sum(-1)  # [Hkv, m]
            caught = (s.square() * (torch.arange(s.shape[-1], dtype=torch.int64, device="cpu") < rank[..., None])).sum(
                -1
            )
            error = 1 - caught / own.clamp(min=1e-30)
            rank = torch.where(error <= self.tolerance**2 + 1e-6, rank.float(), float("inf"))
            numbers += (rank * size[tried]).sum(0)
        return tried[numbers < tokens[tried]]


def _kept_components(s: Tensor, energy: Tensor, tolerance: float) -> Tensor:
    """0/1 gates [..., R]: the fewest leading components with relative Frobenius error at most `tolerance`, or all.

    s [..., R] are singular values of matrices whose squared Frobenius norms are energy [...].
    """
    before = (s.square().cumsum(-1) - s.square()) / energy.clamp(min=1e-30)[..., None]
    return (before < 1 - tolerance**2).float()
