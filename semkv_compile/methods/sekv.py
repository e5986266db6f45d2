"""Resolution-adaptive spans with a trained zoom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.methods.forms import LowRankForms
from semkv.methods.options import Count, FromZero, MeanBits, Share, Tokens, TokensOrNone
from semkv.methods.rank_gates import ProfileRankGates
from semkv.methods.routers import CoarseRouter, GateRouter, OracleRouter
from semkv.methods.segmenters import LiteralSpans, SurprisalSpans
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components, Router, Summary

UNTRAINED = (
    "method 'sekv' needs a profile with a trained router: make one with `semkv-profile MODEL -o OUT`, "
    "or pass config with method_options={'router': 'coarse'} to route without training"
)


@dataclass(frozen=True)
class SeKV(Method):
    """SeKV (Abaskohi et al.): entropy-guided spans stay folded on the host, coarse on the device, and unfold when a query
    asks for them.

    Parameters
    ----------
    router: `trained` (needs a profile), `coarse` (the coarse entry's own score, no training), `untrained` (random W: the
        ablation "no trained zoom"), `oracle` (true attention; an upper bound, not a method).
    fill: unfold in order of gate up to the cap (Sec. 4.1); False: only above the learned thresholds (Sec. 3.3).
    forms: `auto` (the smallest faithful of 8-bit tokens and factors), `raw`, `int8`, `factored` (every span, Eq. 6-8; not with the
        router `oracle`, which reads the tokens).
    max_rank: R_max, components of a factored span.
    alpha, min_span, max_span, window, sinks: of the segmentation; tokens. The budget shrinks the window (to window_share of
        the fixed parts) and the number of spans.
    anchors: keep boundary tokens exact. entropy: False divides into equal chunks.
    weights: `surprisal` (Eq. 2) or `uniform` in means and summaries. routing: `weighted` or `mean` (Eq. 3 mean-pooled).
    coarse: False leaves folded spans out of the softmax. unfold: False never unfolds ("no SVD", coarse only).
    shared_threshold: one threshold for all heads (shows with fill=False).
    bits: of means on the device, 4 or 8. fixed_share: of the budget, for what is not unfolded spans.
    literal: the paper's constants to the letter (alpha 1, L_min 16, window 512), which small budgets refuse.
    """

    router: Literal["trained", "coarse", "untrained", "oracle"] = "trained"
    fill: bool = True
    forms: Literal["auto", "raw", "int8", "factored"] = "auto"
    max_rank: Count = 32
    alpha: FromZero = 1.0
    min_span: Tokens = 4
    max_span: Tokens = 16
    window: Tokens = 512
    window_share: Share = 1 / 6
    sinks: TokensOrNone = 4
    anchors: bool = True
    entropy: bool = True
    weights: Literal["surprisal", "uniform"] = "surprisal"
    routing: Literal["weighted", "mean"] = "weighted"
    coarse: bool = True
    unfold: bool = True
    shared_threshold: bool = False
    bits: MeanBits = 4
    fixed_share: Share = 1 / 2
    literal: bool = False

    name: ClassVar[str] = "sekv"
    minimum_tokens: ClassVar[int] = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_span > self.max_span:
            raise self.wrong("min_span", f"1 to max_span ({self.max_span}) tokens")
        if self.router == "oracle" and self.forms == "factored":
            raise self.wrong(
                "forms", "'auto', 'raw' or 'int8' with the router 'oracle', which reads the tokens of folded spans"
            )

    def check(self, profile: Profile | None) -> None:
        if self.router == "trained" and (profile is None or profile.info.sekv is None):
            raise ConfigError(UNTRAINED)

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components(
            segmenter=self.segmenter(),
            summary=Summary(
                weights=self.weights,
                bits=self.bits,
                attend=self.coarse,
                routing="uniform" if self.routing == "mean" and self.weights == "surprisal" else "derived",
            ),
            router=self._router(program, profile),
            forms=self._forms(program, profile),
            host_form="raw" if self.forms == "raw" else "int8",
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=32,
            fill=self.fill,
            unfold=self.unfold,
            window=self.window,
            window_share=self.window_share,
        )

    def segmenter(self) -> SurprisalSpans | LiteralSpans:
        """How prompts are divided; calibration divides in the same way."""
        if self.literal:
            return LiteralSpans(self.alpha, 16, self.window)
        return SurprisalSpans(
            self.alpha,
            self.min_span,
            self.max_span,
            0.1 if self.anchors else 0.0,
            self.window,
            self.window_share,
            self.sinks,
            entropy=self.entropy,
        )

    def _router(self, program: Program, profile: Profile | None) -> Router:
        if self.router == "oracle":
            return OracleRouter()
        if self.router == "coarse":
            return CoarseRouter()
        stores = [site for site in program.sites if site.treatment == "method"]
        if self.router == "untrained":
            generator = torch.Generator(device="cpu").manual_seed(0)
            weights = {}
            for site in stores:
                dim = max(1, min(32, site.key_dim // 4))
                weights[site.index] = (
                    torch.randn(site.q_heads, dim, site.key_dim, generator=generator, dtype=torch.float32, device="cpu")
                    / site.key_dim**0.5
                )
            zeros = {site.index: torch.zeros(site.q_heads, dtype=torch.float32, device="cpu") for site in stores}
            return GateRouter(weights, zeros, zeros, self.shared_threshold)
        self.check(profile)
        tensors = profile.tensors
        pick = {
            part: {s.index: tensors[f"sekv.{part}.{s.index}"].float() for s in stores}
            for part in ("router", "offset", "threshold")
        }
        return GateRouter(pick["router"], pick["offset"], pick["threshold"], self.shared_threshold)

    def _forms(self, program: Program, profile: Profile | None) -> LowRankForms | None:
        if self.forms in ("raw", "int8") or self.router == "oracle":
            return None
        gates = ProfileRankGates(profile) if profile is not None and profile.info.sekv is not None else None
        floor = profile.info.sekv.gate_floor if gates is not None else 0.1
        if self.forms == "auto":
            return LowRankForms(self.max_rank, only_if_smaller=True)
        return LowRankForms(self.max_rank, gates, floor, only_if_smaller=False)
