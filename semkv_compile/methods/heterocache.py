"""KV heads by their role: pivots and volatile heads whole, anchors static, satellites with what their pivot attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import OncePerPrompt
from semkv.methods.keepers import ObservationWindow, Sinks
from semkv.methods.kept_and_runs import KeptAndRuns
from semkv.methods.options import Count, IndexBits, Overlap, Tokens, TokensOrNone, Width
from semkv.methods.page_routers import MeanKeyRouter
from semkv.methods.pages import Frame, Pages
from semkv.methods.pivots import Heads, PivotRouter, pivot_sites
from semkv.profiles.schema import Profile
from semkv.profiles.schema.allocation import stability_weight
from semkv.profiles.schema.roles import head_roles
from semkv.runtime.components import Components, Part, Plan, own_parts

MISSING = "method 'heterocache' needs a profile with head roles: measure them with `semkv-profile MODEL --steps taxonomy -o OUT`"
WHOLE = ("pivot", "volatile")


@dataclass(frozen=True)
class HeteroCache(OncePerPrompt):
    """HeteroCache (Shi et al., 2026): heads of stable attention keep a static choice of tokens, heads that resemble another
    head follow it, and only the others keep everything. Needs a profile with head roles.

    every: W, steps between looks at a pivot's drift. tau_drift: median overlap below which its satellites are updated; 0:
    tau_stable, this method's or the profile's. tau_stable, tau_similar: thresholds of the roles; 0: the profile's own. pool: width
    of the average pooling of attention, odd. uniform: all compressed heads get the same (ablation). retrieval: False never updates
    satellites (ablation). sinks, recent: first and last tokens that stay in compressed heads. strict: no head is whole, so that any
    budget will do: pivots and volatile heads wait on the host in pages of `page` tokens, chosen by their mean keys of `bits`
    bits, and share the budget like the others. recoverable: what anchors do not keep waits on the host in runs of at most `page`
    tokens, which unfold where a query is like their mean key; half of their budget is for those that do.
    """

    every: Count = 5
    tau_drift: Overlap = 0.0
    tau_stable: Overlap = 0.0
    tau_similar: Overlap = 0.0
    pool: Width = 5
    uniform: bool = False
    retrieval: bool = True
    sinks: TokensOrNone = 4
    recent: Tokens = 32
    strict: bool = False
    recoverable: bool = False
    page: Tokens = 8
    bits: IndexBits = 4

    name: ClassVar[str] = "heterocache"
    minimum_tokens: ClassVar[int] = 40
    keeps_less: ClassVar[str] = "strict=True"
    divides_heads: ClassVar[bool] = True

    def check(self, profile: Profile | None) -> None:
        if profile is None or profile.info.head_taxonomy is None:
            raise ConfigError(MISSING)

    def taxonomy(self, profile: Profile | None) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, ...], ...]]:
        """(roles, clusters) per KV store and head of the user's model, for this method's thresholds."""
        self.check(profile)
        assert profile is not None
        section = profile.info.head_taxonomy
        assert section is not None
        if not self.tau_stable and not self.tau_similar:
            return section.roles, section.clusters
        roles, clusters = list(section.roles), list(section.clusters)
        for number, site in enumerate(profile.info.model.stores):
            overlap = profile.tensors.get(f"taxonomy.overlap.{site.store}")
            if overlap is not None:
                roles[number], clusters[number] = head_roles(
                    section.stability[number],
                    overlap.tolist(),
                    self.tau_stable or section.tau_stable,
                    self.tau_similar or section.tau_similar,
                )
        return tuple(roles), tuple(clusters)

    def head_roles(self, program: Program, profile: Profile | None) -> tuple[tuple[str, ...], ...] | None:
        return self.taxonomy(profile)[0]

    def layer_shares(self, program: Program, profile: Profile | None) -> tuple[float, ...] | None:
        """The sum of the weights (Eq. 8) of a layer's compressed heads, which divide what whole heads leave."""
        roles, _ = self.taxonomy(profile)
        return tuple(
            max(1e-6, sum(self._weight(profile, number, head) for head, role in enumerate(row) if self._shares(role)))
            for number, row in enumerate(roles)
        )

    def components(self, program: Program, profile: Profile | None) -> Components:
        return self.plan(program, profile).all_components()[0]

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        _, clusters = self.taxonomy(profile)
        assert profile is not None
        assert profile.info.head_taxonomy is not None
        pivots: dict[tuple[int, int], int] = {}
        whole = self._whole(program, profile)
        for number, site in enumerate(whole):
            order = site.head_order or tuple(range(site.kv_heads))
            for place, role in enumerate(site.roles):
                if role == "satellite" and site.treatment == "method":
                    pivots[site.store, place] = order.index(clusters[number][order[place]])
        router = PivotRouter(
            pivots,
            self.every,
            self.tau_drift or self.tau_stable or profile.info.head_taxonomy.tau_stable,
            self.pool,
            self.retrieval,
            pivot_sites(program, pivots),
            self._heads(whole),
            self.recent,
            {site.store: site.head_order for site in whole},
        )
        made = self._compositions(router)
        parts = {
            site.store: tuple(self._parts(profile, number, site, made))
            for number, site in enumerate(whole)
            if site.treatment == "method"
        }
        together = {site.store: parts[site.store] for site in program.stores if site.among and site.store in parts}
        for own, site in zip(program.stores, whole):
            if own.store in together:
                parts[own.store] = own_parts(parts[own.store], site.head_order or range(site.kv_heads), own)
        attending = {site.index: router for site, _ in router.sites_of_pivots}
        return Plan(
            parts,
            notes=router.notes(),
            after_prompt=router if pivots else None,
            at_site=attending,
            generated=self.generated,
            together=together,
        )

    def _whole(self, program: Program, profile: Profile | None) -> list[AttentionSite]:
        """The stores' sites with all of the model's heads, grouped by role."""
        roles, _ = self.taxonomy(profile)
        return [
            site if site.among is None else site.grouped(own) for site, own in zip(program.stores, roles, strict=True)
        ]

    def _compositions(self, router: PivotRouter) -> dict[str, Components]:
        """By role."""
        frame = Frame(self.sinks, self.recent, fold_chunk=max(8, self.page if self.strict else 1))
        folded = {
            "outside": "folded",
            "fixed_share": 1 / 2,
            "floor_tokens": 32,
            "window": self.recent,
            "window_share": frame.share,
            "fold_chunk": frame.fold_chunk,
        }
        satellite = Components(segmenter=Pages(1, frame, fixed=True), router=router, host_form="raw", **folded)  # type: ignore[arg-type]
        votes = ObservationWindow(1, self.pool, "mean", self.recent)
        anchor = Components(keeper=votes)
        if self.recoverable:  # an anchor is a part of its own, so that one choice is for all of its heads
            runs = KeptAndRuns(votes, self.page, fold_chunk=max(8, self.page))
            own = folded | {"window_share": 1 / 4, "fold_chunk": runs.fold_chunk}
            anchor = Components(segmenter=runs, router=MeanKeyRouter(self.bits), **own)  # type: ignore[arg-type]
        if self.strict:
            whole = Components(segmenter=Pages(self.page, frame), router=MeanKeyRouter(self.bits), **folded)  # type: ignore[arg-type]
        else:
            whole = Components(keeper=Sinks(self.sinks), whole=True)
        return {"satellite": satellite, "anchor": anchor, "pivot": whole, "volatile": whole}

    def _parts(self, profile: Profile, number: int, site: AttentionSite, made: dict[str, Components]) -> list[Part]:
        """Whole heads in runs; each other head a part of its own, as its budget is its own."""
        order = site.head_order or tuple(range(site.kv_heads))
        weights = [self._weight(profile, number, head) for head in order]
        total = sum(weight for weight, role in zip(weights, site.roles) if self._shares(role))
        parts, first = [], 0
        for key, run in groupby(
            range(site.kv_heads), lambda place: -1 if not self._shares(site.roles[place]) else place
        ):
            last = first + len(list(run))
            share = 1.0 if key < 0 else weights[first] / total
            parts.append(Part(first, last, made[site.roles[first]], share))
            first = last
        return parts

    def _heads(self, stores: Sequence[AttentionSite]) -> Heads:
        whole = sharing = 0
        for site in stores:
            each = (site.key_dim + site.value_dim) * (site.treatment == "method")
            whole += each * sum(not self._shares(role) for role in site.roles)
            sharing += each * sum(self._shares(role) for role in site.roles)
        return Heads(whole, sharing)

    def _shares(self, role: str) -> bool:
        return self.strict or role not in WHOLE

    def _weight(self, profile: Profile | None, number: int, head: int) -> float:
        """Eq. 8, or the same for all heads."""
        assert profile is not None
        assert profile.info.head_taxonomy is not None
        return 1.0 if self.uniform else stability_weight(profile.info.head_taxonomy.stability[number][head])
