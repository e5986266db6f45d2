"""Where the router starts: the best projection of q.k that both sides can share, and offsets that fit the targets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .contexts import SiteRecord, mass_of
from .losses import zoom, zoom_targets
from .parameters import RouterParameters
from .settings import CalibrationSettings


def initialise(
    parameters: RouterParameters, records: Sequence[SiteRecord], scale: float, settings: CalibrationSettings
) -> None:
    """Set a site's router and offsets in place from a few contexts; scale: of the site's attention."""
    router = parameters.router
    if settings.router_init == "covariance":
        queries = second_moment([record.q for record in records])
        # What is the same for all spans moves no span ahead of another: keys are centred within their context.
        keys = second_moment([record.mean_k - record.mean_k.mean(1, keepdim=True) for record in records])
        keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
        router.data.copy_(shared_projection(queries, keys, router.shape[1]))
    with torch.no_grad():
        # Summaries are unit vectors: with their usual length on the query's side, scores begin as logits of the mean keys.
        groups = router.shape[0] // records[0].mean_k.shape[0]
        lengths = [(router @ record.mean_k.repeat_interleave(groups, 0).mT).norm(dim=1).mean(-1) for record in records]
        usual = torch.stack(lengths).mean(0) * scale * math.sqrt(router.shape[1])
        router.mul_(usual[:, None, None])
    _fit_offset(parameters, records, settings)


def second_moment(samples: Sequence[Tensor]) -> Tensor:
    """Mean outer product over samples [H, n, D] of each head, with a trace of D and a little ridge: [H, D, D]."""
    total = sum(
        (x.double().transpose(-1, -2) @ x.double() for x in samples),
        start=torch.zeros((), dtype=torch.float32, device="cpu"),
    )
    dim = total.shape[-1]
    total = total / total.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-20)[:, None, None]
    return (total + 1e-3 * torch.eye(dim, dtype=torch.float64, device=total.device)).float()


def shared_projection(queries: Tensor, keys: Tensor, rank: int, steps: int = 300) -> Tensor:
    """W [H, rank, D] that minimises E[(q.k - Wq.Wk)^2] for second moments [H, D, D] of independent q and k.

    Eq. 3-4 use one projection on both sides, so the truncated SVD of the cross term, which needs two, is out of reach;
    its symmetric part gives the start, gradient descent on tr(Cq E Ck E) with E = I - W^T W the rest.
    """
    dim = queries.shape[-1]
    both = queries @ keys + keys @ queries
    weight = torch.linalg.eigh(both).eigenvectors[..., -rank:].transpose(-1, -2).contiguous()
    weight = weight.detach().clone().requires_grad_(True)
    optimiser = torch.optim.Adam([weight], lr=0.02)
    eye = torch.eye(dim, dtype=torch.float32, device=queries.device)
    scale = (queries * keys).sum((-1, -2)).clamp(min=1e-20)
    with torch.enable_grad():
        for step in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = 0.02 * 0.5 * (1 + math.cos(math.pi * step / steps))
            error = eye - weight.transpose(-1, -2) @ weight
            loss = ((queries @ error * (error @ keys)).sum((-1, -2)) / scale).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return weight.detach()


def explained(weight: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Share of the variance of q.k that Wq.Wk keeps, per head; all [H, ...]."""
    error = torch.eye(queries.shape[-1], dtype=torch.float32, device=queries.device) - weight.transpose(-1, -2) @ weight
    lost = (queries @ error * (error @ keys)).sum((-1, -2))
    return 1 - lost / (queries * keys).sum((-1, -2))


def _fit_offset(
    parameters: RouterParameters, records: Sequence[SiteRecord], settings: CalibrationSettings, steps: int = 100
) -> None:
    """A number per head by logistic regression on Eq. 12's targets; heads without targets start closed."""
    examples, highest = [], torch.zeros_like(parameters.offset)
    with torch.no_grad():
        for record in records:
            scores = parameters.relevance(record.q, record.mean_k, record.log_size)
            targets, mined = zoom_targets(mass_of(record.share, record.span, record.far), record.far, settings)
            examples.append((scores, targets, mined, record.far))
            highest = torch.maximum(highest, scores.amax((1, 2)))
    mined_any = torch.stack([example[2].any(-1) for example in examples]).any(0)
    offset = highest.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([offset], lr=0.0)
    with torch.enable_grad():
        for step in range(steps if bool(mined_any.any()) else 0):
            scores, targets, mined, far = examples[step % len(examples)]
            loss = zoom(scores - offset[:, None, None], targets, mined, far, settings.positive_weight)
            for group in optimiser.param_groups:
                group["lr"] = 0.3 * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        parameters.offset.copy_(torch.where(mined_any, offset, highest))


__all__ = ["explained", "initialise", "second_moment", "shared_projection"]
