"""The token sketch: per KV head the best low-rank stand-in for q.k under measured covariances, and its rank and bits."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.profiles.schema import SketchSection
from semkv.profiles.schema.codes import decode, encode

from .interpreter import SiteCall, full_attention
from .measure import Measure, Outcome, Subject, Sums
from .weights import weight_blocks

RIDGE = 1e-6
"""Added to the diagonal of a covariance, relative to its mean, so that it has a Cholesky factor."""


def best_projections(queries: Tensor, keys: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The A and B [H, D, rank] for which (q A).(k B) is nearest to q.k, and the spectrum [H, D].

    For q and k independent with second moments Cq = Lq Lq^T and Ck = Lk Lk^T [H, D, D], E[(q.k - (qA).(kB))^2] is least
    where A B^T = Lq^-T M_r Lk^-1 with M_r the best rank-r matrix of M = Lq^T Lk. With M = U S V^T that is
    A = Lk V S^-1/2 and B = Lq U S^-1/2: nothing is inverted. The spectrum is S^2 over its sum: the error that is left
    is the sum of its tail.
    """
    lower_q, lower_k = _factor(queries), _factor(keys)
    u, s, vt = torch.linalg.svd(lower_q.transpose(-1, -2) @ lower_k)
    root = s[..., None, :rank].clamp(min=1e-30).sqrt()
    a = lower_k @ vt.transpose(-1, -2)[..., :rank] / root
    b = lower_q @ u[..., :rank] / root
    # A singular vector's sign is arbitrary: the largest entry of each column is made positive.
    sign = torch.take_along_dim(b, b.abs().argmax(-2, keepdim=True), -2).sign()
    energy = s.square()
    return a * sign, b * sign, energy / energy.sum(-1, keepdim=True).clamp(min=1e-300)


def _factor(moments: Tensor) -> Tensor:
    moments = moments.double()
    scale = moments.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    eye = torch.eye(moments.shape[-1], dtype=torch.float64, device="cpu")
    return torch.linalg.cholesky(moments + RIDGE * scale[..., None, None] * eye)


def chosen_tokens(scores: Tensor, kv_heads: int, count: int) -> Tensor:
    """Bool [Hkv, T, n]: the `count` best tokens of each KV head by the maximum over its query heads of scores [Hq, T, n].

    scores: of a softmax, so that query heads can be compared.
    """
    best = scores.unflatten(0, (kv_heads, -1)).amax(1)
    return torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(count, -1).indices, True)


def caught_mass(weights: Tensor, chosen: Tensor) -> Tensor:
    """Attention [Hq, T, n] on chosen tokens [Hkv, T, n], summed over the group and the queries: [Hkv]."""
    return (weights.unflatten(0, (chosen.shape[0], -1)) * chosen[:, None]).sum((1, 2, 3))


class Sketch(Measure):
    """Covariances on the samples first, then on held-out ones what each rank and width in bits finds."""

    name = "sketch"
    field = "sketch"
    prefix = "sketch."

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.sites = {site.index: site for site in subject.program.sites if site.treatment == "method"}
        self.made: dict[int, dict[str, Tensor]] = {}
        ranks = {rank for rank in self.settings.sketch_ranks if rank <= self.settings.sketch_rank}
        pairs = [(rank, bits) for rank in ranks or {self.settings.sketch_rank} for bits in self.settings.sketch_bits]
        self.candidates = sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]))

    @property
    def units(self) -> int:
        return len(self.subject.data.measured) + len(self.subject.data.held_out)

    def measure(self, unit: int, sums: Sums) -> None:
        """One pass over a sample: its covariances, or with those of all samples known, what sketches catch."""
        samples = self.subject.data.measured
        if unit < len(samples):
            self._pass(samples[unit][1], sums, self._covariances)
            return
        if not self.made:
            self.made = {site: self._projections(sums, site) for site in self.sites}
        self._pass(self.subject.data.held_out[unit - len(samples)][1], sums, self._catch)

    def _pass(self, ids: Tensor, sums: Sums, look) -> None:
        context = len(ids) - self.settings.steps

        def attend(call: SiteCall) -> Tensor:
            if call.site in self.sites:
                look(call, context, sums)
            return full_attention(call)

        self.subject.run(ids, attend)

    def _covariances(self, call: SiteCall, context: int, sums: Sums) -> None:
        """Second moments of the decode steps' queries, pooled over each group, and of the context's keys.

        Keys are centred within their context: what all tokens of a context share moves none ahead of another.
        """
        kv_heads, site = call.k.shape[0], call.site
        q = call.q[:, context:].double().unflatten(0, (kv_heads, -1)).flatten(1, 2)
        k = call.k[:, :context].double()
        centred = k - k.mean(1, keepdim=True)
        sums.add(f"queries.{site}", q.transpose(1, 2) @ q / q.shape[1])
        sums.add(f"keys.{site}", centred.transpose(1, 2) @ centred / context)
        sums.add(f"key_mean.{site}", k.mean(1))
        sums.add(f"key_square.{site}", k.transpose(1, 2) @ k / context)
        sums.add(f"samples.{site}", 1.0)

    def _projections(self, sums: Sums, site: int) -> dict[str, Tensor]:
        """The tensors of one site as the profile stores them, float32."""
        count = sums[f"samples.{site}"]
        rank = min(self.settings.sketch_rank, self.sites[site].key_dim)
        a, b, spectrum = best_projections(sums[f"queries.{site}"] / count, sums[f"keys.{site}"] / count, rank)
        mean = torch.einsum("hd,hdr->hr", sums[f"key_mean.{site}"] / count, b)
        square = torch.einsum("hdr,hde,her->hr", b, sums[f"key_square.{site}"] / count, b)
        std = (square - mean.square()).clamp(min=1e-12).sqrt()
        named = {"query": a, "key": b, "mean": mean, "std": std, "spectrum": spectrum}
        return {name: tensor.float().contiguous() for name, tensor in named.items()}

    def _catch(self, call: SiteCall, context: int, sums: Sums) -> None:
        """Attention on the context that the best tokens hold, and that the tokens of each candidate's choice hold."""
        kv_heads, device = call.k.shape[0], call.k.device
        parts = {name: tensor.to(device) for name, tensor in self.made[call.site].items()}
        count = max(1, round(self.settings.sketch_share * context))
        codes = call.k[:, :context].float() @ parts["key"]
        mean, std = parts["mean"], parts["std"]
        stored = {bits: decode(encode(codes, mean, std, bits), mean, std, bits) for bits in self.settings.sketch_bits}
        q = torch.einsum("hgtd,hdr->hgtr", call.q.float().unflatten(0, (kv_heads, -1)), parts["query"]) * call.scale
        best = torch.zeros(kv_heads, dtype=torch.float32, device=device)
        caught = torch.zeros(len(self.candidates), kv_heads, dtype=torch.float32, device=device)
        for start, weights in weight_blocks(call, context, self.settings.block):
            weights = weights[..., :context]
            best += caught_mass(weights, chosen_tokens(weights, kv_heads, count))
            asked = q[:, :, start : start + weights.shape[1]]
            for place, (rank, bits) in enumerate(self.candidates):
                logits = torch.einsum("hgtr,hnr->hgtn", asked[..., :rank], stored[bits][..., :rank]).flatten(0, 1)
                chosen = chosen_tokens(torch.softmax(logits, -1), kv_heads, count)
                caught[place] += caught_mass(weights, chosen)
        sums.add(f"best.{call.site}", best)
        sums.add(f"caught.{call.site}", caught)

    def finish(self, sums: Sums) -> Outcome:
        """The cheapest rank and bits per retrieving head that catch `sketch_target`, or those that catch most."""
        tensors: dict[str, Tensor] = {}
        rows: dict[str, list[tuple]] = {"ranks": [], "bits": [], "energy": [], "caught": []}
        retrieving = self.retrieving()
        for site in self.subject.program.sites:
            row: dict[str, list] = {name: [] for name in rows}
            if site.index in self.sites:
                parts = self.made.get(site.index) or self._projections(sums, site.index)
                tensors |= {f"sketch.{name}.{site.index}": tensor for name, tensor in parts.items()}
                shares = (sums[f"caught.{site.index}"] / sums[f"best.{site.index}"].clamp(min=1e-12)).clamp(0, 1)
                tensors[f"sketch.caught.{site.index}"] = shares.T.float().contiguous()
                for head in range(site.kv_heads):
                    wanted = retrieving is None or (site.index, head) in retrieving
                    place = self._cheapest(shares[:, head].tolist()) if wanted else None
                    rank, bits = (0, 0) if place is None else self.candidates[place]
                    row["ranks"].append(min(rank, site.key_dim))
                    row["bits"].append(bits)
                    row["energy"].append(_share(float(parts["spectrum"][head, :rank].sum())))
                    row["caught"].append(0.0 if place is None else _share(float(shares[place, head])))
            for name, values in row.items():
                rows[name].append(tuple(values))
        section = SketchSection(
            rank=self.settings.sketch_rank,
            candidates=tuple(self.candidates),
            ranks=tuple(rows["ranks"]),
            bits=tuple(rows["bits"]),
            energy=tuple(rows["energy"]),
            caught=tuple(rows["caught"]),
            share=self.settings.sketch_share,
            target=self.settings.sketch_target,
        )
        note = (
            ""
            if retrieving is not None
            else ("no retrieval heads are known, so that every head has a sketch: run the step retrieval-heads first")
        )
        return Outcome(section, tensors, note)

    def _cheapest(self, caught: list[float]) -> int:
        enough = [place for place, value in enumerate(caught) if value >= self.settings.sketch_target]
        return enough[0] if enough else max(range(len(caught)), key=caught.__getitem__)

    def retrieving(self) -> set[tuple[int, int]] | None:
        """(site, KV head) of the heads that retrieve; None where retrieval heads were not measured."""
        profile = self.subject.profile
        known = profile.info.retrieval_heads if profile is not None else None
        if known is None:
            return None
        scores: dict[tuple[int, int], float] = {}
        for index, site in self.sites.items():
            row = (
                torch.tensor(known.semantic[index], dtype=torch.float32, device="cpu").view(site.kv_heads, -1).amax(-1)
            )
            scores |= {(index, head): value for head, value in enumerate(row.tolist())}
        bar = min(self.settings.retrieves, self.settings.retrieves_relative * max(scores.values()))
        return {place for place, value in scores.items() if value >= bar and value > 0}


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 6)
