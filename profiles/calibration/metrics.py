"""How well a router finds what the teacher looks at, on held-out contexts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .contexts import SiteRecord, mass_of
from .losses import zoom_targets
from .parameters import RouterParameters
from .settings import CalibrationSettings

COVERAGE_SHARE = 0.06
"""Share of the tokens so far that the report unfolds: what a budget of a tenth leaves beside its fixed parts."""


@torch.no_grad()
def mass_at_cap(order: Tensor, record: SiteRecord, share: float, settings: CalibrationSettings) -> tuple[float, float]:
    """Teacher attention on unfolded far spans, and on all far spans, at mined positions, when spans are unfolded in `order`.

    order [Hq, T, S]: larger first. Per KV head and query, the group's best score of a span counts, and spans are taken while they fit
    into `share` of the tokens up to the query.
    """
    kv_heads = record.mean_k.shape[0]
    mass = mass_of(record.share, record.span, record.far)
    _, mined = zoom_targets(mass, record.far, settings)
    best = order.unflatten(0, (kv_heads, -1)).amax(1).masked_fill(~record.far, float("-inf"))  # [Hkv, T, S]
    ranked = best.argsort(dim=-1, descending=True, stable=True)
    sizes = record.lengths.float()[ranked]
    fits = sizes.cumsum(-1) <= share * (record.where + 1)[:, None]
    taken = torch.zeros_like(best, dtype=torch.bool).scatter(-1, ranked, fits)
    taken = taken.repeat_interleave(mass.shape[0] // kv_heads, 0)
    chosen = mined[..., None].float() * mass
    return float((chosen * taken).sum()), float(chosen.sum())


@torch.no_grad()
def caught_counts(
    parameters: RouterParameters, record: SiteRecord, settings: CalibrationSettings, share: float = COVERAGE_SHARE
) -> dict[str, float]:
    """The teacher's attention on far spans (`mass`), and what of it `share` of the tokens catch when spans are unfolded by the router's
    margin (`caught`), by the direction of the mean key, which needs no training (`coarse`), and by the attention itself (`oracle`)."""
    caught, mass = mass_at_cap(parameters.margins(record), record, share, settings)
    coarse = mass_at_cap(direction_scores(record), record, share, settings)[0]
    oracle = mass_at_cap(mass_of(record.share, record.span, record.far), record, share, settings)[0]
    return {"caught": caught, "coarse": coarse, "oracle": oracle, "mass": mass}


def direction_scores(record: SiteRecord) -> Tensor:
    """What the router `coarse` orders spans by: the product of each query with the direction of the mean key, [Hq, T, S]."""
    keys = torch.nn.functional.normalize(record.mean_k, dim=-1)
    return record.q @ keys.repeat_interleave(record.q.shape[0] // keys.shape[0], 0).mT


@torch.no_grad()
def zoom_counts(parameters: RouterParameters, record: SiteRecord, settings: CalibrationSettings) -> dict[str, float]:
    """Targets, zoomed targets and zooms at mined positions, and mean figures."""
    targets, mined = zoom_targets(mass_of(record.share, record.span, record.far), record.far, settings)
    zoomed = (parameters.margins(record) > 0) & record.far
    wanted = targets & mined[..., None]
    return {
        "targets": float(wanted.sum()),
        "hits": float((zoomed & wanted).sum()),
        "zooms": float((zoomed & mined[..., None]).sum()),
        "mined": float(mined.float().mean()),
        "zoom_rate": float(zoomed.sum() / (record.far.sum() * len(zoomed)).clamp(min=1)),
    }


def shares(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Several contexts' counts as shares: `caught`, `coarse` and `oracle` of the mass; recall, precision and means of zooms."""
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    found = {name: total[name] / max(total["mass"], 1e-9) for name in ("caught", "coarse", "oracle")}
    if "targets" in total:
        found["recall"] = total["hits"] / max(1.0, total["targets"])
        found["precision"] = total["hits"] / max(1.0, total["zooms"])
        found |= {name: total[name] / len(counts) for name in ("mined", "zoom_rate")}
    return found
