"""The student: the same model reading a context at mixed resolution, differentiable in the zoom decisions and gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from semkv.ir.program import Program

from .contexts import Context, SiteContext, Spans
from .interpreter import SiteCall, run_body, scores
from .parameters import SekvParameters, straight_through


@dataclass(frozen=True)
class SiteTrace:
    """What one site of the student decided: zoom [Hq, T, S] in {0, 1}, gates [Hkv, S, R] of keys and of values."""

    zoom: Tensor
    key_gates: Tensor
    value_gates: Tensor


def run_student(program: Program, context: Context, parameters: SekvParameters) -> tuple[Tensor, dict[int, SiteTrace]]:
    """Log-probabilities [T, vocab] of the context's queries and each folding site's decisions.

    The queries run like an `extend` of the runtime: their own keys and values are exact and causal, the context is read
    through anchors, window, span means and the spans that they zoom into.
    """
    traces: dict[int, SiteTrace] = {}

    def attend(call: SiteCall) -> Tensor:
        site = context.sites[call.site]
        if site.spans is None:
            return _attend(call, site, None, None, None, None)
        trace, k, v = _decide(call, site.spans, parameters)
        traces[call.site] = trace
        # Scores of all tokens of a layer live only while that layer runs, forward or backward.
        return checkpoint(_attend, call, site, site.spans, trace.zoom, k, v, use_reentrant=False)

    hidden = run_body(program.body, context.ids, context.positions, attend)
    return torch.log_softmax(program.head(hidden[None])[0].float(), -1), traces


def _decide(call: SiteCall, spans: Spans, parameters: SekvParameters) -> tuple[SiteTrace, Tensor, Tensor]:
    """Zoom decisions (Eq. 9) and gated reconstructions (Eq. 8) of keys [Hkv, S, L, D] and values [Hkv, S, L, Dv]."""
    summaries = parameters.summaries(call.site, spans.mean_k)
    relevance = parameters.relevance(call.site, call.q.float(), summaries, spans.log_size)
    # The offset is trained by the zoom loss alone: it says what a gate of one half means, not how much to zoom.
    offset = parameters.offset[str(call.site)].detach()[:, None, None]
    threshold = parameters.threshold[str(call.site)][:, None, None]
    zoom = straight_through(relevance - offset - threshold)
    key_gates = parameters.rank_gates(spans.key_sigma, summaries, spans.log_size, "key")
    value_gates = parameters.rank_gates(spans.value_sigma, summaries, spans.log_size, "value")
    k = rebuild(spans.key_u, key_gates, spans.k)
    v = rebuild(spans.value_u, value_gates, spans.v)
    return SiteTrace(zoom, key_gates, value_gates), k, v


def rebuild(u: Tensor, gates: Tensor, x: Tensor) -> Tensor:
    """Eq. 8 as U diag(m) U^T X, since sigma_i v_i^T = u_i^T X: u [..., L, R], gates [..., R], x [..., L, D]."""
    return (u * gates[..., None, :]) @ (u.transpose(-1, -2) @ x)


def _attend(
    call: SiteCall, site: SiteContext, spans: Spans | None, zoom: Tensor | None, k: Tensor | None, v: Tensor | None
) -> Tensor:
    """One softmax over exact, coarse and unfolded entries, in which a zoom of 0 or 1 multiplies an entry's weight.

    Multiplying (instead of adding log zoom to the score) is what lets gradients reach a decision of 0.
    """
    exact_k = torch.cat([site.kept_k.float(), call.k.float()], 1)
    exact_v = torch.cat([site.kept_v.float(), call.v.float()], 1)
    logits = [scores(call, exact_k, torch.cat([site.kept_positions, call.positions]))]
    weights, values = [torch.ones_like(logits[0])], [exact_v]
    if spans is not None:
        logits.append(scores(call, spans.mean_k, spans.mean_positions) + spans.log_size)
        weights.append(1 - zoom)
        values.append(spans.mean_v)
        fine = scores(call, k.flatten(1, 2), spans.positions.flatten())
        logits.append(fine.masked_fill(~spans.real.flatten(), float("-inf")))
        weights.append(zoom[..., None].expand(*zoom.shape, spans.real.shape[1]).flatten(2))
        values.append(v.flatten(1, 2))
    if call.sinks is not None:
        logits.append(call.sinks.float().view(-1, 1, 1).expand(-1, call.q.shape[1], 1))
        weights.append(torch.ones_like(logits[-1]))
    scored, weight = torch.cat(logits, -1), torch.cat(weights, -1)
    # The largest score of an open entry, so that a closed one can neither overflow nor drown the open ones.
    top = scored.masked_fill(weight.detach() <= 0, float("-inf")).amax(-1, keepdim=True).detach()
    mass = torch.exp((scored - top).clamp(max=30.0)) * weight
    share = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
    value = torch.cat(values, 1)
    share = share[..., : value.shape[1]].unflatten(0, (value.shape[0], -1))
    return torch.einsum("hgtn,hnd->hgtd", share, value).flatten(0, 1)
