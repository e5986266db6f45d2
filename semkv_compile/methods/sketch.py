"""Single tokens chosen by a calibrated low-rank, low-bit code of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.keepers import Sinks
from semkv.methods.options import CodeBits, CountOrNone, CountOrProfile, Share, Tokens, TokensOrNone
from semkv.methods.pages import Frame, Pages
from semkv.methods.routers import OracleRouter
from semkv.methods.sketch_router import SketchMaps, SketchRouter
from semkv.profiles.schema import Profile, SketchSection
from semkv.runtime.budget import Budget
from semkv.runtime.components import Components, Part, Plan

MISSING = "method 'sketch' needs a profile with a token sketch: make one with `semkv-profile MODEL --steps retrieval-heads,sketch -o OUT`"


@dataclass(frozen=True)
class HeadKind:
    """Of one KV head: rank and bits of its sketch, or, where rank is 0, the role that says what it holds instead, or that it keeps
    every token."""

    rank: int = 0
    bits: int = 0
    role: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Sketch(Method):
    """The token sketch: every token of a retrieving KV head has a code of a few bytes on the device; the best are unfolded.

    Calibration finds, per KV head, the best approximation of q.k of rank r under the measured covariances, and the rank
    and bits that find the attention (`semkv.profiles.schema.SketchSection`). Heads that do not retrieve get none: they keep
    their first and recent tokens.

    rank, bits: of every sketch; 0: per head the profile's own, or, where those take more than `code_share` of what the head has
    at the budget (a fraction), the ones that found most attention among those that do not. code_bits: instead of `code_share`,
    the most bits per token and head. all_heads: sketch heads that do not retrieve as well.
    idle_share: of an even share of the budget, what a head without a sketch keeps. sinks, window: exact tokens of heads with a
    sketch. fixed_share: of their budget, for codes and exact tokens. oracle: true attention chooses in place of codes, which are
    neither made nor charged: the ceiling of any sketch with these budgets, not a method.
    """

    rank: CountOrProfile = 0
    bits: CodeBits = 0
    all_heads: bool = False
    idle_share: Share = 0.12
    sinks: TokensOrNone = 4
    window: Tokens = 32
    fixed_share: Share = 1 / 2
    code_share: Share = 0.25
    code_bits: CountOrNone = 0
    oracle: bool = False

    name: ClassVar[str] = "sketch"
    minimum_tokens: ClassVar[int] = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.code_share > self.fixed_share:
            raise self.wrong("code_share", f"a share in (0, fixed_share ({self.fixed_share})]")

    def check(self, profile: Profile | None) -> None:
        if profile is None or profile.info.sketch is None:
            raise ConfigError(MISSING)

    def for_budget(self, program: Program, profile: Profile | None, budget: Budget) -> Method:
        if self.rank or self.bits or self.code_bits or not isinstance(budget.value, float):
            return self  # of a number of tokens nobody knows yet which fraction it is
        stores = [site for site in program.stores if not site.window]
        heads = sum(site.kv_heads for site in stores)
        whole = sum(kind.whole for site in stores for kind in self._kinds(profile, site))
        sharing = sum(sum(self._weights(profile, site)) for site in stores)
        share = max(0.0, budget.value * heads - whole) / max(1e-6, sharing)
        bits = min(8 * budget.dtype.itemsize * (site.key_dim + site.value_dim) for site in stores)
        return replace(self, code_bits=max(1, int(self.code_share * share * bits)))

    def components(self, program: Program, profile: Profile | None) -> Components:
        return self.plan(program, profile).all_components()[0]

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        self.check(profile)
        frame = Frame(self.sinks, self.window)
        router = self.router(program, profile)
        chooser = OracleRouter() if self.oracle else router
        found = Components(
            segmenter=Pages(1, frame, fixed=True),
            router=chooser,
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=16,
            window=self.window,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
        )
        idle: dict[str, Components] = {}
        parts: dict[int, tuple[Part, ...]] = {}
        for site in program.stores:
            if site.treatment != "method":
                continue
            weights = self._weights(profile, site)
            made = []
            for first, last, kind in self._runs(profile, site):
                if kind.whole:
                    made.append(Part(first, last, Components(keeper=Sinks(self.sinks), whole=True)))
                    continue
                if kind.rank:
                    router.maps[site.store, first] = self._maps(profile, site, first, last, kind)
                elif kind.role not in idle:
                    idle[kind.role] = self.idle(program, profile, kind.role)
                share = sum(weights[first:last]) / sum(weights)
                made.append(Part(first, last, found if kind.rank else idle[kind.role], share))
            parts[site.store] = tuple(made)
        return Plan(parts)

    def router(self, program: Program, profile: Profile | None) -> SketchRouter:
        """What chooses tokens for heads that have a sketch; `plan` fills in the maps."""
        return SketchRouter({})

    def idle(self, program: Program, profile: Profile | None, role: str) -> Components:
        """What heads of this role without a sketch hold."""
        return Components(keeper=Sinks(self.sinks), outside="dropped")

    def role(self, profile: Profile | None, site: AttentionSite, head: int) -> str:
        """By which `idle` tells heads without a sketch apart; `head` in the order of the user's model."""
        return ""

    def keeps_whole(self, profile: Profile | None, site: AttentionSite, head: int) -> bool:
        """Whether this head keeps every token on the device; `head` in the order of the user's model."""
        return False

    def layer_weight(self, profile: Profile | None, site: AttentionSite) -> float:
        """What `idle_share` is multiplied by in the layer of `site`."""
        return 1.0

    def layer_shares(self, program: Program, profile: Profile | None) -> tuple[float, ...] | None:
        return tuple(max(1e-6, sum(self._weights(profile, site)) / site.kv_heads) for site in program.stores)

    def _section(self, profile: Profile | None) -> SketchSection:
        self.check(profile)
        assert profile is not None
        assert profile.info.sketch is not None
        return profile.info.sketch

    def _kinds(self, profile: Profile | None, site: AttentionSite) -> list[HeadKind]:
        """The kind of each KV head in the order of the lowered program."""
        section = self._section(profile)
        kinds = []
        for head in site.head_order or range(site.kv_heads):
            if self.keeps_whole(profile, site, head):
                kinds.append(HeadKind(whole=True))
                continue
            rank, bits = section.ranks[site.index][head], section.bits[site.index][head]
            if not rank and not self.all_heads:
                kinds.append(HeadKind(role=self.role(profile, site, head)))
                continue
            rank, bits = self._within(profile, site, head, rank or section.rank, bits or 4)
            kinds.append(HeadKind(min(self.rank or rank, section.rank, site.key_dim), self.bits or bits))
        return kinds

    def _within(self, profile: Profile | None, site: AttentionSite, head: int, rank: int, bits: int) -> tuple[int, int]:
        """`rank` and `bits`, or of those that were measured the ones that find most in `code_bits` per token."""
        if not self.code_bits or rank * bits <= self.code_bits:
            return rank, bits
        assert profile is not None
        candidates = self._section(profile).candidates
        caught = profile.tensors[f"sketch.caught.{site.index}"][head].tolist()
        fitting = [place for place, pair in enumerate(candidates) if pair[0] * pair[1] <= self.code_bits]
        return candidates[max(fitting, key=caught.__getitem__)] if fitting else candidates[0]

    def _weights(self, profile: Profile | None, site: AttentionSite) -> list[float]:
        """What each KV head gets of an even share of what whole heads leave, in the order of the lowered program."""
        if site.window:
            return [1.0] * site.kv_heads
        idle = self.idle_share * self.layer_weight(profile, site)
        return [0.0 if kind.whole else 1.0 if kind.rank else idle for kind in self._kinds(profile, site)]

    def _runs(self, profile: Profile | None, site: AttentionSite) -> Iterator[tuple[int, int, HeadKind]]:
        """(first, last, kind) of neighbouring KV heads that are alike."""
        first = 0
        for kind, run in groupby(self._kinds(profile, site)):
            last = first + len(list(run))
            yield first, last, kind
            first = last

    def _maps(self, profile: Profile | None, site: AttentionSite, first: int, last: int, kind: HeadKind) -> SketchMaps:
        assert profile is not None
        order = list(site.head_order or range(site.kv_heads))[first:last]
        names = ("query", "key", "mean", "std")
        query, key, mean, std = (profile.tensors[f"sketch.{name}.{site.index}"].float()[order] for name in names)
        rank = kind.rank
        return SketchMaps(query[..., :rank], key[..., :rank], mean[..., :rank], std[..., :rank], kind.bits)
