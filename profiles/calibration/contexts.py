"""One teacher pass over a sequence: what a student needs of every site, collected a layer at a time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.runtime.quantization import dequantize, quantize
from semkv.runtime.record import chunked_surprisal
from semkv.runtime.segments import Folding, Segmentation

from .interpreter import SiteCall, full_attention, run_body, scores
from .segmentation import Divider
from .settings import CalibrationSettings


@dataclass(frozen=True)
class Spans:
    """The folded spans of one site: S spans of at most L tokens, R components.

    k [Hkv, S, L, D], v [Hkv, S, L, Dv], positions [S, L], real [S, L] bool; mean_k [Hkv, S, D], mean_v [Hkv, S, Dv] as
    the runtime keeps them, mean_positions [S], log_size [S]; key_u, value_u [Hkv, S, L, R] left singular vectors and
    key_sigma, value_sigma [Hkv, S, R] singular values, descending. Padding is zero.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    real: Tensor
    mean_k: Tensor
    mean_v: Tensor
    mean_positions: Tensor
    log_size: Tensor
    key_u: Tensor
    key_sigma: Tensor
    value_u: Tensor
    value_sigma: Tensor


@dataclass(frozen=True)
class SiteContext:
    """What one site keeps of a context, and what its teacher looked at.

    kept_k [Hkv, n, D], kept_v [Hkv, n, Dv], kept_positions [n]: exact tokens. spans: None where the site folds nothing.
    q [Hq, T, D]: the teacher's queries behind the context. mass [Hq, T, S]: teacher attention on each span.
    """

    kept_k: Tensor
    kept_v: Tensor
    kept_positions: Tensor
    spans: Spans | None = None
    q: Tensor | None = None
    mass: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """A sequence after its teacher pass: ids and positions [T] of the queries, teacher log-probabilities [T, vocab]."""

    ids: Tensor
    positions: Tensor
    log_probs: Tensor
    sites: tuple[SiteContext, ...]
    segmentation: Segmentation
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return _nbytes(self)


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(_nbytes, value))
    if hasattr(value, "__dataclass_fields__"):
        return sum(_nbytes(getattr(value, field.name)) for field in fields(value))
    return 0


def map_tensors(value: Any, change: Any) -> Any:
    """A copy of a context (or a part of one) with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        changed = {field.name: map_tensors(getattr(value, field.name), change) for field in fields(value)}
        return replace(value, **changed)
    return value


@torch.no_grad()
def read_context(
    program: Program, ids: Tensor, settings: CalibrationSettings, divide: Divider, budget: float, store: torch.dtype
) -> Context:
    """Run the teacher over ids [n + queries] and fold its first n tokens under `budget`; floats are kept in `store`.

    Memory: the sequence's keys and values, as a KV cache holds them, and the attention of the queries in one layer
    [Hq, queries, n]; never an attention matrix of the whole sequence.
    """
    device = ids.device
    n = len(ids) - settings.queries
    positions = torch.arange(len(ids), dtype=torch.int64, device=device)
    calls: dict[int, SiteCall] = {}

    def collect(call: SiteCall) -> Tensor:
        calls[call.site] = replace(call, q=call.q[:, n:].clone(), positions=call.positions[n:])
        return full_attention(call)

    hidden = run_body(program.body, ids, positions, collect)
    surprisal = chunked_surprisal(program.head, hidden[:n], ids[:n])
    log_probs = torch.log_softmax(program.head(hidden[None, n:])[0].float(), -1)
    segmentation = divide(surprisal, budget)
    sites = []
    for index, site in enumerate(program.sites):
        call = calls.pop(index)
        folds = site.treatment == "method" and len(segmentation.starts) > 0
        kept = _fold(call, positions, n, segmentation, surprisal, settings) if folds else _keep(call, positions, n)
        sites.append(map_tensors(kept, lambda t: t.to(store) if t.is_floating_point() else t))
    return Context(ids[n:], positions[n:], log_probs.to(store), tuple(sites), segmentation, n)


def _keep(call: SiteCall, positions: Tensor, n: int) -> SiteContext:
    first = max(0, n - call.window) if call.window else 0
    return SiteContext(call.k[:, first:n].clone(), call.v[:, first:n].clone(), positions[first:n])


def _fold(
    call: SiteCall, where: Tensor, n: int, segmentation: Segmentation, surprisal: Tensor, settings: CalibrationSettings
) -> SiteContext:
    """Fold one site: keys and values [Hkv, n + queries, ...] at positions `where`, queries those behind the context."""
    device = call.k.device
    kept = torch.cat([segmentation.kept, torch.arange(segmentation.recent, n, dtype=torch.int64, device="cpu")]).to(
        device
    )
    starts, lengths = segmentation.starts.to(device), segmentation.lengths.to(device)
    longest = int(lengths.max())
    offsets = torch.arange(longest, dtype=torch.int64, device=device)
    real = offsets < lengths[:, None]
    places = (starts[:, None] + offsets).clamp(max=n - 1)  # [S, L]
    k = call.k[:, places].float() * real[..., None]
    v = call.v[:, places].float() * real[..., None]
    folded = segmentation.folded.to(device)
    known = surprisal[segmentation.folded].to(device)
    folding = Folding(call.k[:, folded], call.v[:, folded], where[folded], known, lengths)
    weights = folding.surprisal_weights()

    def summary(x: Tensor) -> Tensor:
        return dequantize(quantize(folding.mean(x, weights), settings.summary_bits))

    rank = min(longest, settings.max_rank)
    key_u, key_sigma = left_factors(k, rank)
    value_u, value_sigma = left_factors(v, rank)
    mean_positions = (where[places] * real).sum(1) // lengths
    attention = scores(call, call.k, where)  # [Hq, T, tokens]
    if call.sinks is not None:
        sink = call.sinks.float().view(-1, 1, 1).expand(-1, attention.shape[1], 1)
        attention = torch.cat([attention, sink], -1)
    attention = torch.softmax(attention, -1)
    mass = (attention[..., places] * real).sum(-1)
    spans = Spans(
        k,
        v,
        where[places],
        real,
        summary(folding.k),
        summary(folding.v),
        mean_positions,
        lengths.float().log(),
        key_u,
        key_sigma,
        value_u,
        value_sigma,
    )
    return SiteContext(call.k[:, kept], call.v[:, kept], where[kept], spans, call.q, mass)


def left_factors(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left singular vectors [..., L, r] and singular values [..., r] of x [..., L, D], from the Gram matrix.

    The rest of the decomposition follows: sigma_i v_i^T = u_i^T x. Computed in float64, where squaring costs nothing
    that the gates could see.
    """
    wide = x.double()
    values, vectors = torch.linalg.eigh(wide @ wide.transpose(-1, -2))
    values, vectors = values.flip(-1)[..., :rank], vectors.flip(-1)[..., :rank]
    return vectors.float(), values.clamp(min=0).sqrt().float()
