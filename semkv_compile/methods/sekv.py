"""Resolution-adaptive spans with a zoom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.forms import LowRankForms
from semkv.methods.options import Count, FromZero, MeanBits, Share, Tokens, TokensOrNone
from semkv.methods.paper_spans import PaperSpans
from semkv.methods.rank_gates import ProfileRankGates
from semkv.methods.routers import CoarseRouter, GateRouter, OracleRouter, own_heads
from semkv.methods.segmenters import BySurprisal, SurprisalSpans
from semkv.profiles.schema import Profile
from semkv.profiles.schema.sections import SekvSection
from semkv.runtime.components import Components, Router, Summary

NO_ROUTER = (
    "method 'sekv' with router='trained' needs a profile with a trained router: make one with `semkv-profile MODEL -o OUT`, "
    "or leave router='coarse', which needs none"
)
START = 0.05
"""Where thresholds begin to be trained, a probability."""

PAPER: Mapping[str, Any] = MappingProxyType(
    {
        "router": "trained",
        "spans": "paper",
        "min_span": 16,
        "max_span": 64,
        "sinks": 1,
        "forms": "factored",
        "fill": False,
        "bits": 16,
        "coarse": True,
    }
)
"""SeKV as its paper has it, as far as the budget reaches."""


@dataclass(frozen=True)
class SeKV(Method):
    """SeKV (Abaskohi et al.): entropy-guided spans stay folded on the host, coarse on the device, and unfold when a query
    asks for them.

    Parameters
    ----------
    router: `coarse` (the mean key's direction, no training; the default, as training was not seen to pay: docs/results/sekv_defaults.md),
        `trained` (the paper's; needs a profile), `initial` (the gate as training begins: ablation), `untrained` (random W: the ablation
        "no trained zoom"), `oracle` (true attention; an upper bound, not a method).
    fill: unfold in order of gate up to the cap (Sec. 4.1); False: only above the thresholds (Sec. 3.3).
    forms: `auto` (the smallest faithful of 8-bit tokens and factors), `raw`, `int8`, `factored` (every span, Eq. 6-8; not with the
        router `oracle`, which reads the tokens).
    max_rank: R_max, components of a factored span.
    spans: `budget` (as many as the budget affords, of even size, the strongest boundaries being anchors) or `paper` (Sec. 3.1: every
        boundary an anchor, short spans exact, alpha raised until it fits).
    alpha, min_span, max_span, window, sinks: of the segmentation; tokens. The budget shrinks the window (to window_share of
        the fixed parts) and the number of spans.
    anchors: keep boundary tokens exact. entropy: False divides into chunks of the spans' mean size.
    weights: `surprisal` (Eq. 2) or `uniform` in means and summaries. routing: `weighted` or `mean` (Eq. 3 mean-pooled).
    coarse: folded spans have an entry in the softmax, their means, which costs more than it says (docs/methods.md). unfold: False never
        unfolds ("no SVD", coarse only).
    shared_threshold: one threshold, the offset of the gate included, for all heads.
    bits: of means on the device, 4 or 8; 16: in the KV dtype. fixed_share: of the budget, for what is not unfolded spans.
    """

    router: Literal["coarse", "trained", "initial", "untrained", "oracle"] = "coarse"
    fill: bool = True
    forms: Literal["auto", "raw", "int8", "factored"] = "auto"
    max_rank: Count = 32
    spans: Literal["budget", "paper"] = "budget"
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
    coarse: bool = False
    unfold: bool = True
    shared_threshold: bool = False
    bits: MeanBits = 4
    fixed_share: Share = 1 / 2

    name: ClassVar[str] = "sekv"
    minimum_tokens: ClassVar[int] = 40
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": PAPER}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_span > self.max_span:
            raise self.wrong("min_span", f"1 to max_span ({self.max_span}) tokens")
        if self.router == "oracle" and self.forms == "factored":
            raise self.wrong(
                "forms", "'auto', 'raw' or 'int8' with the router 'oracle', which reads the tokens of folded spans"
            )
        if not self.unfold and not self.coarse:
            raise self.wrong("coarse", "True with unfold=False: else folded spans are never seen")

    def check(self, profile: Profile | None) -> None:
        router = self.router
        if router == "trained" and _section(profile) is None:
            raise ConfigError(NO_ROUTER)
        if router == "initial" and (section := _section(profile)) is not None and section.router_init == "covariance":
            raise self.wrong(
                "router", "'untrained' to compare with: a profile does not hold where a router of covariances began"
            )
        if router in ("coarse", "oracle"):
            for option, usual in (("shared_threshold", False), ("routing", "weighted")):
                if getattr(self, option) != usual:
                    raise self.wrong(
                        option,
                        f"{usual!r} with the router {router!r}, which has no gate: use a trained or 'initial' one",
                    )

    def notes(self, profile: Profile | None) -> tuple[str, ...]:
        said = []
        if self.forms == "factored" and (gates := _gates(profile)) is not None and gates.trained < self.max_rank:
            said.append(
                f"rank gates know the first {gates.trained} components of a span; further ones, up to max_rank {self.max_rank}, are "
                "kept by what they add"
            )
        return tuple(said)

    def components(self, program: Program, profile: Profile | None) -> Components:
        self.check(profile)
        segmenter = self.segmenter()
        return Components(
            segmenter=segmenter,
            summary=Summary(
                weights=self.weights,
                bits=self.bits,
                attend=self.coarse,
                routing="uniform" if self.routing == "mean" and self.weights == "surprisal" else "derived",
            ),
            router=self._router(program, profile),
            forms=self._forms(profile),
            host_form="raw" if self.forms == "raw" else "int8",
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=32,
            fill=self.fill,
            unit=self.max_span,
            unfold=self.unfold,
            window=self.window,
            window_share=self.window_share,
            fold_chunk=segmenter.fold_chunk,
        )

    def segmenter(self) -> BySurprisal:
        """How prompts are divided; calibration divides in the same way."""
        own = {
            name: getattr(self, name)
            for name in ("alpha", "min_span", "max_span", "window", "window_share", "sinks", "entropy")
        }
        if self.spans == "paper":
            return PaperSpans(**own, anchors=self.anchors, fold_chunk=max(8, self.min_span))
        return SurprisalSpans(**own, anchor_share=0.1 if self.anchors else 0.0)

    def _router(self, program: Program, profile: Profile | None) -> Router:
        router = self.router
        if router == "oracle":
            return OracleRouter()
        if router == "coarse":
            return CoarseRouter()
        stores = [site for site in program.sites if site.treatment == "method"]
        if router == "untrained":
            return self._gate(_random_weights(stores, 0, 32), 0.0, stores)
        if router == "initial":
            return self._initial(stores, profile)
        assert profile is not None
        tensors = profile.tensors
        pick = {
            part: {s.index: own_heads(s, tensors[f"sekv.{part}.{s.index}"].float()) for s in stores}
            for part in ("router", "offset", "threshold")
        }
        if self.shared_threshold:  # the mean of all heads, whichever of them are here
            limits = [
                tensors[f"sekv.offset.{s.index}"].float() + tensors[f"sekv.threshold.{s.index}"].float() for s in stores
            ]
            mean = torch.cat(limits).mean()
            pick["offset"] = {index: torch.zeros_like(x) for index, x in pick["offset"].items()}
            pick["threshold"] = {index: mean.expand(len(x)) for index, x in pick["threshold"].items()}
        return GateRouter(pick["router"], pick["offset"], pick["threshold"], self.shared_threshold)

    def _initial(self, stores: list[AttentionSite], profile: Profile | None) -> GateRouter:
        """The gate before the first step of the profile's training; without one, of the calibration's defaults."""
        section = _section(profile)
        settings = {} if profile is None or section is None else profile.info.provenance.settings
        start = float(settings.get("threshold_start", START))
        if section is not None and section.router_init == "random":
            weights = _random_weights(stores, int(settings.get("seed", 0)), int(settings.get("routing_dim", 32)))
        else:
            weights = {
                site.index: torch.eye(site.key_dim, dtype=torch.float32, device="cpu").repeat(site.q_heads, 1, 1)
                for site in stores
            }
        return self._gate(weights, math.log(start / (1 - start)), stores)

    def _gate(self, weights: dict[int, Tensor], threshold: float, stores: list[AttentionSite]) -> GateRouter:
        offsets = {site.index: torch.zeros(site.q_heads, dtype=torch.float32, device="cpu") for site in stores}
        thresholds = {index: zeros + threshold for index, zeros in offsets.items()}
        return GateRouter(weights, offsets, thresholds, self.shared_threshold)

    def _forms(self, profile: Profile | None) -> LowRankForms | None:
        if self.forms in ("raw", "int8") or self.router == "oracle":
            return None
        if self.forms == "auto":
            return LowRankForms(self.max_rank, only_if_smaller=True)
        section = _section(profile)
        floor = 0.1 if section is None else section.gate_floor
        return LowRankForms(self.max_rank, _gates(profile), floor, only_if_smaller=False)


def _section(profile: Profile | None) -> SekvSection | None:
    return None if profile is None else profile.info.sekv


def _gates(profile: Profile | None) -> ProfileRankGates | None:
    return None if profile is None or profile.info.sekv is None else ProfileRankGates(profile)


def _random_weights(stores: list[AttentionSite], seed: int, routing_dim: int) -> dict[int, Tensor]:
    """W [Hq, d', D] of normal entries, d' at most a quarter of the head dim."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    weights = {}
    for site in stores:
        dim = max(1, min(routing_dim, site.key_dim // 4))
        heads = site.q_heads if site.among is None else site.among.kv_heads * site.group_size
        noise = torch.randn(heads, dim, site.key_dim, generator=generator, dtype=torch.float32, device="cpu")
        weights[site.index] = own_heads(site, noise) / site.key_dim**0.5
    return weights
