"""One teacher pass over a sequence: what the training of each site needs, handed over a site at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.runtime.prompt.record import chunked_surprisal
from semkv.runtime.store.quantization import dequantize, quantize
from semkv.runtime.store.segments import Cut, Segmentation

from .interpreter import SiteCall, full_attention, run_body, scores
from .segmentation import Divider
from .settings import CalibrationSettings

LARGEST = 6e4
"""Of half precision, in which a record is kept."""

PIECES = 12
"""Pieces of text per size that the rank gates learn from, of each site and context."""


@dataclass(frozen=True)
class SiteRecord:
    """What one site's training reads of a context of N tokens in S spans, for T of its queries. Floats are half precision.

    q [Hq, T, D]; where int64 [T]: positions of the queries. share [Hq, T, N]: the teacher's attention; v [Hkv, N, Dv]. span int64 [N]:
    the span of each token, -1 where it is exact in every case. lengths, ends int64 [S]: tokens of each span and its last one's place.
    mean_k [Hkv, S, D], mean_v [Hkv, S, Dv]: means as the runtime keeps them. coarse [Hq, T, S]: weight of each span's mean, in units of
    the teacher's whole attention. far bool [T, S]: spans that have left the query's window; all others are exact for it, as far as it
    sees them. key_sigma, value_sigma [Hkv, P, R], piece_k [Hkv, P, D], pieces int64 [P]: singular values, mean key and size of pieces of
    the text, for the rank gates.
    """

    q: Tensor
    where: Tensor
    share: Tensor
    v: Tensor
    span: Tensor
    lengths: Tensor
    ends: Tensor
    mean_k: Tensor
    mean_v: Tensor
    coarse: Tensor
    far: Tensor
    key_sigma: Tensor
    value_sigma: Tensor
    piece_k: Tensor
    pieces: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By name, for a file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device) -> SiteRecord:
        """A copy with float32 in place of half precision, but for `share` and `v`, the large ones."""
        large = ("share", "v")
        return SiteRecord(
            **{
                name: x.to(device, torch.float32) if x.is_floating_point() and name not in large else x.to(device)
                for name, x in self.tensors().items()
            }
        )

    @property
    def log_size(self) -> Tensor:
        """[S]."""
        return self.lengths.float().log()


Keep = Callable[[int, SiteRecord], None]
"""Called with a site's index and its record."""


@torch.no_grad()
def read_context(
    program: Program, ids: Tensor, settings: CalibrationSettings, divide: Divider, budget: float, keep: Keep
) -> Segmentation:
    """Run the teacher over ids [n + queries], fold its first n tokens under `budget`, and hand over a record of each site.

    Memory: the sequence's keys and values, as a KV cache holds them, and the attention of two times `queries` tokens in one layer;
    never an attention matrix of the whole sequence.

    Raises
    ------
    ConfigError: the context is too short to be folded.
    """
    device = ids.device
    n = len(ids) - settings.queries
    positions = torch.arange(len(ids), dtype=torch.int64, device=device)
    asked = candidates(n, settings.queries).to(device)
    sites = {site.index for site in program.sites if site.treatment == "method"}
    calls: dict[int, SiteCall] = {}

    def collect(call: SiteCall) -> Tensor:
        if call.site in sites:
            calls[call.site] = replace(call, q=call.q[:, asked].clone(), positions=call.positions[asked])
        return full_attention(call)

    hidden = run_body(program.body, ids, positions, collect)
    surprisal = chunked_surprisal(program.head, hidden[:n], ids[:n])
    segmentation = divide(surprisal, budget)
    if not len(segmentation.starts):
        raise ConfigError(f"a context of {n} tokens has nothing to fold: give a larger --length")
    for index in sorted(calls):
        keep(index, record_of(calls.pop(index), n, segmentation, surprisal, settings))
    return segmentation


def candidates(n: int, queries: int) -> Tensor:
    """Positions int64 of the queries that are looked at: all behind the context, and as many spread over its last three quarters."""
    inside = torch.linspace(n // 4, n - 1, min(queries, n - n // 4), dtype=torch.float64, device="cpu").long()
    return torch.cat([inside, torch.arange(n, n + queries, dtype=torch.int64, device="cpu")])


def record_of(
    call: SiteCall, n: int, segmentation: Segmentation, surprisal: Tensor, settings: CalibrationSettings
) -> SiteRecord:
    """The record of one site. call: keys and values [Hkv, N, ...] of all tokens, queries of the candidates alone."""
    device, tokens = call.k.device, call.k.shape[1]
    everywhere = torch.arange(tokens, dtype=torch.int64, device=device)
    starts, lengths = segmentation.starts.to(device), segmentation.lengths.to(device)
    folded = segmentation.folded.to(device)
    span = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    span[folded] = torch.arange(len(lengths), dtype=torch.int64, device=device).repeat_interleave(lengths)
    ends = starts + lengths - 1

    logits = scores(call, call.k, everywhere)  # [Hq, T, N]
    sink = None if call.sinks is None else call.sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
    whole = torch.logsumexp(logits if sink is None else torch.cat([logits, sink], -1), -1, keepdim=True)
    share = (logits - whole).exp()
    del logits
    far = ends < call.positions[:, None] - (n - segmentation.recent)
    chosen = far_queries(mass_of(share, span, far), settings)
    call = replace(call, q=call.q[:, chosen], positions=call.positions[chosen])
    share, far, whole = share[:, chosen], far[chosen], whole[:, chosen]

    known = surprisal[segmentation.folded.to(surprisal.device)].to(device)
    cut = Cut(everywhere[folded], known, lengths)
    mean_k, mean_v = (
        dequantize(quantize(cut.mean(x[:, folded], cut.surprisal_weights), settings.summary_bits))
        for x in (call.k, call.v)
    )
    middle = (starts + ends) // 2
    coarse = (scores(call, mean_k, middle) + lengths.float().log() - whole).exp().masked_fill(~far, 0.0)
    at, sizes = piece_places(n, settings.max_rank)
    spectra = [spectrum_of(x, at, sizes, settings.max_rank) for x in (call.k, call.v)]
    piece_k = torch.stack([call.k[:, a : a + size].float().mean(1) for a, size in zip(at, sizes)], 1)
    made = SiteRecord(
        call.q,
        call.positions,
        share,
        call.v,
        span,
        lengths,
        ends,
        mean_k,
        mean_v,
        coarse,
        far,
        spectra[0],
        spectra[1],
        piece_k,
        torch.tensor(sizes, dtype=torch.int64, device=device),
    )
    kept = {
        name: x.clamp(-LARGEST, LARGEST).half().cpu() if x.is_floating_point() else x.cpu()
        for name, x in made.tensors().items()
    }
    return SiteRecord(**{name: x.contiguous() for name, x in kept.items()})


def mass_of(share: Tensor, span: Tensor, far: Tensor) -> Tensor:
    """Attention share [Hq, T, N] summed over the tokens of each span that is far: float32 [Hq, T, S]."""
    inside = span >= 0
    sums = torch.zeros(*share.shape[:2], far.shape[1], dtype=torch.float32, device=share.device)
    sums.index_add_(2, span[inside], share[..., inside].float())
    return sums * far


def far_queries(mass: Tensor, settings: CalibrationSettings) -> Tensor:
    """Which `queries` of the candidates are trained on, ascending: drawn with their attention on far spans [Hq, T, S] as weights."""
    weight = mass.sum((0, 2)).cpu() + 1e-6
    generator = torch.Generator(device="cpu").manual_seed(settings.seed)
    count = min(settings.queries, len(weight))
    return torch.multinomial(weight, count, generator=generator).sort().values.to(mass.device)


def piece_places(n: int, max_rank: int) -> tuple[list[int], list[int]]:
    """First token and size of pieces of a context, from 2 tokens to twice `max_rank`: merged spans are long, and their last components
    are gated too."""
    sizes = [2]
    while 2 * sizes[-1] <= min(2 * max_rank, n // 2):
        sizes.append(2 * sizes[-1])
    at = [i * (n - size) // PIECES for size in sizes for i in range(PIECES)]
    return at, [size for size in sizes for _ in range(PIECES)]


def spectrum_of(x: Tensor, at: list[int], sizes: list[int], rank: int) -> Tensor:
    """Singular values [Hkv, P, rank] of pieces of x [Hkv, N, D], descending, with zeros behind the last."""
    found = []
    for start, size in zip(at, sizes):
        sigma = torch.linalg.svdvals(x[:, start : start + size].float())[:, :rank]
        found.append(torch.nn.functional.pad(sigma, (0, rank - sigma.shape[1])))
    return torch.stack(found, 1)
