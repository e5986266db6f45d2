"""One layer's attention at mixed resolution, differentiable in the zoom decisions, and how far it is from the teacher's."""

from __future__ import annotations

import torch
from torch import Tensor

from .contexts import SiteRecord


def layer_output(record: SiteRecord, zoom: Tensor | None, rows: Tensor) -> Tensor:
    """Attention [Hq, len(rows), Dv] of some queries over exact tokens, the tokens of zoomed spans, and the means of all others.

    zoom [Hq, len(rows), S]: in {0, 1} with gradients; it multiplies the weights of a span's tokens, and one minus it the weight of its
    mean, so that closed decisions learn too. None: everything is exact, the teacher's own output. Spans that are near count as open.
    """
    share, v = record.share[:, rows].float(), record.v.float()
    kv_heads = v.shape[0]
    if zoom is None:
        return _weighted(share, v, kv_heads)
    far = record.far[rows]
    opened = torch.where(far, zoom, torch.ones_like(zoom))
    # One more for tokens that belong to no span.
    opened = torch.nn.functional.pad(opened, (0, 1), value=1.0)
    exact = share * opened[..., record.span.where(record.span >= 0, opened.shape[-1] - 1)]
    closed = record.coarse[:, rows] * (1 - zoom) * far
    # What neither holds of the teacher's whole is a sink's, whose value is zero.
    rest = (1 - share.sum(-1, keepdim=True)).clamp(min=0)
    total = exact.sum(-1, keepdim=True) + closed.sum(-1, keepdim=True) + rest
    return (_weighted(exact, v, kv_heads) + _weighted(closed, record.mean_v, kv_heads)) / total.clamp(min=1e-12)


def _weighted(weights: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    return torch.einsum("hgtn,hnd->hgtd", weights.unflatten(0, (kv_heads, -1)), v).flatten(0, 1)


def output_error(output: Tensor, teacher: Tensor) -> Tensor:
    """What takes Eq. 11's place: squared error of the layer's attention [Hq, T, Dv] over the teacher's energy, sum over heads."""
    lost = (output - teacher).square().sum((1, 2))
    return (lost / teacher.square().sum((1, 2)).clamp(min=1e-12)).sum()
