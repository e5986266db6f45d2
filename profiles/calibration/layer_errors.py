"""CompressKV's layer errors (Eq. 6-12): what extreme compression does to each layer's output, with full-cache queries."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.methods.window_scores import shared_votes
from semkv.profiles.schema import LayerErrors

from .interpreter import SiteCall, full_attention
from .measure import Measure, Outcome, Subject, Sums
from .projection import ShadowInterpreter, output_regions
from .weights import attention_weights, query_block


def select_tokens(weights: Tensor, keep: int, pool: int, heads: list[int]) -> Tensor:
    """One index set for a layer (Sec. 4.2): places [keep] ascending, of the window and of what its queries look at.

    weights [Hq, w, n]: the last w tokens' attention on a context of n. The best keep - w places before the window by the votes of
    `heads`, the method's own (`semkv.methods.window_scores.shared_votes`), stay, and the window itself.
    """
    window, tokens = weights.shape[1:]
    votes = shared_votes(weights[..., : tokens - window], heads, pool)
    best = votes.topk(min(keep - window, len(votes))).indices
    recent = torch.arange(tokens - window, tokens, dtype=torch.int64, device=weights.device)
    return torch.cat([best.sort().values, recent])


def compressed_attention(call: SiteCall, context: int, kept: Tensor, block: int) -> Tensor:
    """Attention of the decode steps [Hq, steps, Dv] on the kept places of the context and on the steps before them."""
    tokens = call.q.shape[1]
    places = torch.cat([kept, torch.arange(context, tokens, dtype=torch.int64, device=kept.device)])
    k, v, where = call.k[:, places], call.v[:, places].float(), call.positions[places]
    parts = []
    for start in range(context, tokens, block):
        part = attention_weights(query_block(call, start, min(start + block, tokens)), k, where)
        grouped = part.unflatten(0, (v.shape[0], -1))
        parts.append(torch.einsum("hgtn,hnd->hgtd", grouped, v).flatten(0, 1))
    return torch.cat(parts, 1)


def relative_errors(lost: Tensor, whole: Tensor, epsilon: float) -> Tensor:
    """The summand of Eq. 8 for each step, from squared norms [steps] of the difference and of the full output."""
    return lost.sqrt() / (whole.sqrt() + epsilon)


def normalised(rows: dict[str, list[float]]) -> tuple[dict[str, list[float]], list[float]]:
    """Eq. 10 for each data set, and Eq. 11-12 over them: per-layer errors of any scale -> shares that sum to 1.

    A data set without any error tells nothing about layers and counts as all equal.
    """
    shares = {}
    for name, row in rows.items():
        total = sum(row)
        shares[name] = [value / total if total > 0 else 1 / len(row) for value in row]
    mean = [sum(row[i] for row in shares.values()) / len(shares) for i in range(len(next(iter(rows.values()))))]
    return shares, [value / sum(mean) for value in mean]


class CompressionErrors(Measure):
    """Errors per KV store on held-out samples; tokens are chosen as CompressKV does, by the profile's retrieval heads."""

    name = "layer-errors"
    field = "layer_errors"

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.regions = output_regions(subject.program.body)

    @property
    def units(self) -> int:
        return len(self.subject.data.held_out)

    def measure(self, unit: int, sums: Sums) -> None:
        """One pass with the full cache; each layer's decode steps are attended a second time with the kept tokens."""
        name, ids = self.subject.data.held_out[unit]
        context = len(ids) - self.settings.steps
        program, window = self.subject.program, self.settings.observation
        stores = {site.index: site.store for site in program.sites if site.treatment == "method"}
        squares: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(call: SiteCall) -> Tensor:
            output = full_attention(call)
            if call.site in stores:
                seen = query_block(call, context - window, context)
                weights = attention_weights(seen, call.k[:, :context], call.positions[:context])
                heads = self.selectors(call.site, call.q.shape[0])
                kept = select_tokens(weights, self.settings.keep, self.settings.pool, heads)
                changed = output.clone()
                changed[:, context:] = compressed_attention(call, context, kept, self.settings.block)
                shadow.shadow[call.site] = changed
            return output

        def compare(site: int, full: Tensor, other: Tensor) -> None:
            """Squared norms of each step; a projection in several parts counts as one output."""
            full, other = full[context:].float(), other[context:].float()
            lost, whole = squares.get(
                site,
                (
                    torch.zeros(len(full), dtype=torch.float32, device="cpu"),
                    torch.zeros(len(full), dtype=torch.float32, device="cpu"),
                ),
            )
            squares[site] = (lost + (other - full).square().sum(-1).cpu(), whole + full.square().sum(-1).cpu())

        shadow = ShadowInterpreter(program.body, self.regions, attend, compare)
        ids = ids.to(self.subject.device)
        with torch.no_grad():
            shadow.run(ids[None], torch.arange(len(ids), dtype=torch.int64, device=ids.device)[None])
        for site, (lost, whole) in squares.items():
            sums.add(f"error.{name}.{stores[site]}", relative_errors(lost, whole, self.settings.epsilon).sum())
            sums.add(f"sites.{name}.{stores[site]}", 1.0)
        sums.add("samples", 1.0)

    def selectors(self, site: int, q_heads: int) -> list[int]:
        """The query heads that choose: the best semantic retrieval heads of the layer, or all where none are known."""
        profile = self.subject.profile
        known = profile.info.retrieval_heads if profile is not None else None
        if known is None:
            return list(range(q_heads))
        row = known.semantic[site]
        return sorted(sorted(range(q_heads), key=lambda head: (-row[head], head))[: self.settings.selectors])

    def finish(self, sums: Sums) -> Outcome:
        """Normalise within each data set, average, normalise again."""
        stores = [site.store for site in self.subject.program.stores]
        counted = {site.store for site in self.subject.owners}
        rows: dict[str, list[float]] = {}
        relative = [0.0] * len(stores)
        for name in self.subject.data.set_names:
            row = []
            for store in stores:
                error, passes = sums.get(f"error.{name}.{store}"), sums.get(f"sites.{name}.{store}")
                row.append(float(error / passes) if error is not None and passes is not None else 0.0)
            rows[name] = row
            for place, value in enumerate(row):
                relative[place] += value / len(self.subject.data.set_names) / self.settings.steps
        shares, errors = normalised(
            {name: [row[stores.index(s)] for s in sorted(counted)] for name, row in rows.items()}
        )
        section = LayerErrors(
            errors=_spread(errors, stores, counted),
            relative=tuple(round(value, 6) for value in relative),
            sets={name: _spread(row, stores, counted) for name, row in shares.items()},
            keep=self.settings.keep,
            window=self.settings.observation,
            steps=self.settings.steps,
            samples=self.units,
        )
        known = self.subject.profile is not None and self.subject.profile.info.retrieval_heads is not None
        chosen = (
            f"by the {self.settings.selectors} best retrieval heads of a layer" if known else "by all heads of a layer"
        )
        return Outcome(section, note=f"tokens chosen {chosen}; {_where(self.regions, self.subject.program)}")


def _spread(values: list[float], stores: list[int], counted: set[int]) -> tuple[float, ...]:
    """One entry per KV store, 0 for those that were not counted."""
    given = dict(zip(sorted(counted), values))
    return tuple(round(given.get(store, 0.0), 8) for store in stores)


def _where(regions: tuple, program: Program) -> str:
    bare = [site.name or str(site.index) for site, region in zip(program.sites, regions) if not region.inside]
    if not bare:
        return "measured after the output projection"
    return f"measured after the output projection, at the attention itself where there is none: {', '.join(bare)}"
