"""How well a router finds what the teacher looks at, on held-out contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .contexts import Context, SiteContext
from .losses import zoom_targets
from .parameters import SekvParameters
from .settings import CalibrationSettings
from .student import SiteTrace

COVERAGE_SHARE = 0.06
"""Share of a context's tokens that the report unfolds: what a budget of a tenth leaves beside its fixed parts."""


def zoom_counts(site: SiteContext, trace: SiteTrace, settings: CalibrationSettings) -> dict[str, float]:
    """Counts of one site and context: targets, zoomed targets and zooms at mined positions, and mean figures."""
    targets, mined = zoom_targets(site.mass, settings)
    zoomed = trace.zoom.detach() > 0.5
    wanted = targets & mined[..., None]
    return {
        "targets": float(wanted.sum()),
        "hits": float((zoomed & wanted).sum()),
        "zooms": float((zoomed & mined[..., None]).sum()),
        "mined": float(mined.float().mean()),
        "zoom_rate": float(zoomed.float().mean()),
        "key_rank": float(trace.key_gates.sum(-1).mean()),
        "value_rank": float(trace.value_gates.sum(-1).mean()),
    }


def ratios(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Recall, precision and means over contexts of `zoom_counts`; 0 where there is nothing to divide by."""
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    means = {name: total[name] / len(counts) for name in ("mined", "zoom_rate", "key_rank", "value_rank")}
    recall = total["hits"] / max(1.0, total["targets"])
    return {"recall": recall, "precision": total["hits"] / max(1.0, total["zooms"]), **means}


@torch.no_grad()
def mass_at_cap(order: Tensor, site: SiteContext, tokens: float, settings: CalibrationSettings) -> tuple[float, float]:
    """Teacher attention on unfolded spans, and on all spans, at mined positions, when spans are unfolded in `order`.

    order [Hq, T, S]: larger first. Per KV head and query, the group's best score of a span counts, and spans are taken
    while they fit into `tokens`.
    """
    kv_heads = site.spans.mean_k.shape[0]
    _, mined = zoom_targets(site.mass, settings)
    best = order.unflatten(0, (kv_heads, -1)).amax(1)  # [Hkv, T, S]
    ranked = best.argsort(-1, descending=True)
    sizes = site.spans.real.sum(-1).float()[ranked]
    fits = sizes.cumsum(-1) <= tokens
    taken = torch.zeros_like(best, dtype=torch.bool).scatter(-1, ranked, fits)
    taken = taken.repeat_interleave(site.mass.shape[0] // kv_heads, 0)
    chosen = mined[..., None].float() * site.mass
    return float((chosen * taken).sum()), float(chosen.sum())


@torch.no_grad()
def caught_counts(
    parameters: SekvParameters, context: Context, site: int, share: float, settings: CalibrationSettings
) -> dict[str, float]:
    """The teacher's attention on spans (`mass`), and what of it `share` of the context's tokens catch when spans are
    unfolded by the router's margin (`caught`) and by the attention itself (`oracle`)."""
    part = context.sites[site]
    room = share * context.tokens
    caught, mass = mass_at_cap(margins(parameters, site, part), part, room, settings)
    return {"caught": caught, "oracle": mass_at_cap(part.mass, part, room, settings)[0], "mass": mass}


def caught_shares(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """`caught` and `oracle` of `caught_counts` over several contexts, as shares of the attention on spans."""
    total = {name: sum(count[name] for count in counts) for name in ("caught", "oracle", "mass")}
    return {name: total[name] / max(total["mass"], 1e-9) for name in ("caught", "oracle")}


def margins(parameters: SekvParameters, site: int, part: SiteContext) -> Any:
    """score - offset - threshold of the teacher's queries, [Hq, T, S]: what spans are ordered by over the cap."""
    summaries = parameters.summaries(site, part.spans.mean_k)
    relevance = parameters.relevance(site, part.q, summaries, part.spans.log_size)
    key = str(site)
    return relevance - (parameters.offset[key] + parameters.threshold[key])[:, None, None]
