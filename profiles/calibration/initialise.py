"""Where the router starts: the best projection of q.k that both sides can share, and offsets that fit the targets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .contexts import Context
from .losses import zoom, zoom_targets
from .parameters import SekvParameters
from .settings import CalibrationSettings

CLOSED = 3.0
"""Offset above log |S| of heads that never attend to a few spans: their gates start near sigmoid(-3)."""


def initialise(parameters: SekvParameters, contexts: Sequence[Context], settings: CalibrationSettings) -> None:
    """Set routers and offsets in place from a few contexts (whose floats are float32)."""
    for key in parameters.router:
        sites = [context.sites[int(key)] for context in contexts if context.sites[int(key)].spans is not None]
        if not sites:
            continue
        router = parameters.router[key]
        if settings.router_init == "covariance":
            queries = second_moment([site.q for site in sites])
            # What is the same for all spans moves no span ahead of another: keys are centred within their context.
            keys = second_moment([site.spans.mean_k - site.spans.mean_k.mean(1, keepdim=True) for site in sites])
            keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)
            router.data.copy_(shared_projection(queries, keys, router.shape[1]))
        _fit_scale_and_offset(parameters, int(key), sites, settings)


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


def _fit_scale_and_offset(
    parameters: SekvParameters, site: int, sites: Sequence, settings: CalibrationSettings, steps: int = 200
) -> None:
    """Two numbers per head by logistic regression on Eq. 12's targets: the length of W, which enters Eq. 5
    through the query alone, and the offset; heads without targets start closed."""
    key = str(site)
    examples = []
    with torch.no_grad():
        for context in sites:
            spans = context.spans
            summaries = parameters.summaries(site, spans.mean_k)
            relevance = parameters.relevance(site, context.q, summaries, spans.log_size)
            targets, mined = zoom_targets(context.mass, settings)
            examples.append((relevance - spans.log_size, spans.log_size, targets, mined))
    sizes = torch.cat([example[1] for example in examples])
    heads = parameters.offset[key].shape[0]
    mined_any = torch.stack([example[3].any(-1) for example in examples]).any(0)
    log_scale = torch.zeros(heads, device=sizes.device, requires_grad=True, dtype=torch.float32)
    offset = torch.full_like(log_scale, float(sizes.mean()) + CLOSED).requires_grad_(True)
    optimiser = torch.optim.Adam([log_scale, offset], lr=0.05)
    with torch.enable_grad():
        for _ in range(steps):
            loss = sum(
                (
                    zoom(
                        log_scale.exp()[:, None, None] * score + size - offset[:, None, None],
                        targets,
                        mined,
                        settings.positive_weight,
                    )
                    for score, size, targets, mined in examples
                ),
                start=torch.zeros((), dtype=torch.float32, device="cpu"),
            )
            if not loss.requires_grad:
                break
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        # A head without targets keeps its scale; W enters Eq. 5 once, since summaries are normalised.
        scale = torch.where(mined_any, log_scale.exp(), torch.ones_like(log_scale))
        parameters.router[key].mul_(scale[:, None, None])
        parameters.offset[key].copy_(torch.where(mined_any, offset, sizes.mean() + CLOSED))


__all__ = ["explained", "initialise", "second_moment", "shared_projection"]
