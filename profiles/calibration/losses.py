"""The losses of SeKV's training: the paper's zoom, reconstruction and budget terms (Eq. 12-15) and a ranking term of ours.

The paper sums over layers, heads and spans. Here sums run over heads, means over spans and query positions, and the reconstruction error
is relative to the span's energy, so that one set of weights holds for any context length and any model's scale of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .settings import CalibrationSettings


def zoom_targets(mass: Tensor, far: Tensor, settings: CalibrationSettings) -> tuple[Tensor, Tensor]:
    """Eq. 12: the smallest set of far spans that reaches `coverage` of the teacher's attention on far spans, where mined.

    mass [Hq, T, S], zero where far bool [T, S] is not -> targets [Hq, T, S] bool, mined [Hq, T] bool. A position of a head is mined
    when its attention goes beyond anchors and window, and to few spans: a head that averages over everything is served by the means.
    """
    order = mass.argsort(dim=-1, descending=True, stable=True)
    ranked = mass.gather(-1, order)
    total = mass.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    targets = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, before < settings.coverage * total)
    targets &= mass > 0
    few = targets.sum(-1) <= (settings.mined_share * far.sum(-1)).clamp(min=1.0)
    return targets, (total[..., 0] >= settings.mined_mass) & few


def zoom(gate_logits: Tensor, targets: Tensor, mined: Tensor, far: Tensor, positive_weight: float) -> Tensor:
    """Eq. 13: positive-weighted BCE on the gates at mined positions, mean over them and far spans, sum over heads.

    gate_logits, targets [Hq, T, S], mined [Hq, T], far [T, S]. Heads without a mined position add nothing.
    """
    y = targets.to(gate_logits.dtype)
    each = positive_weight * y * torch.nn.functional.softplus(-gate_logits)
    each = each + (1 - y) * torch.nn.functional.softplus(gate_logits)
    each = (each * far).sum(-1) / far.sum(-1).clamp(min=1)
    chosen = mined.to(each.dtype)
    return ((each * chosen).sum(-1) / chosen.sum(-1).clamp(min=1)).sum()


def ranking(scores: Tensor, mass: Tensor, mined: Tensor, far: Tensor) -> Tensor:
    """Ours: KL of the teacher's attention over far spans and a softmax of their scores, at mined positions, sum over heads.

    scores, mass [Hq, T, S], mined [Hq, T], far [T, S]. Eq. 13 asks for membership only; under a cap the order decides, and what a wrong
    order loses is attention.
    """
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
    log_chosen = torch.log_softmax(scores.masked_fill(~far, -1e9), -1)
    each = (torch.xlogy(target, target) - target * log_chosen).sum(-1)
    chosen = mined.to(each.dtype)
    return ((each * chosen).sum(-1) / chosen.sum(-1).clamp(min=1)).sum()


def reconstruction(gates: Tensor, sigma: Tensor) -> Tensor:
    """Eq. 14 for one factorisation: sum_i (1 - m_i)^2 sigma_i^2 over sum_i sigma_i^2, mean over spans, sum over heads.

    gates, sigma [Hkv, S, R]; the singular values are constants.
    """
    energy = sigma.detach().square()
    error = ((1 - gates).square() * energy).sum(-1) / energy.sum(-1).clamp(min=1e-20)
    return error.mean(-1).sum()


def retained_rank(gates: Tensor, sigma: Tensor) -> Tensor:
    """Eq. 15's second term for one factorisation: the sum of the gates of components that exist, mean over spans, sum over heads."""
    return (gates * (sigma > 0)).sum(-1).mean(-1).sum()
