"""Sketches where heads retrieve and spans with zoom elsewhere, with switches for parts of the other systems."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.heterocache import WHOLE
from semkv.methods.keepers import ObservationWindow, Sinks
from semkv.methods.options import Allowed, Share
from semkv.methods.sekv import SeKV
from semkv.methods.sentencekv import SentenceRouter, mean_query
from semkv.methods.sketch import Sketch
from semkv.methods.sketch_router import SketchRouter
from semkv.methods.specontext import SpeContext
from semkv.methods.speculation import Speculation, SpeculativeRouter
from semkv.profiles.schema import Profile
from semkv.profiles.schema.retrieval_head import RetrievalHead
from semkv.runtime.components import Brought, Components, Plan, own_parts
from semkv.runtime.components import Part as Runs
from semkv.runtime.decode.units import Units
from semkv.runtime.step import Step
from semkv.runtime.views import UnitsView

NEEDED = {
    "spans": ("sekv", "sekv", "others='window'"),
    "roles": ("head_taxonomy", "taxonomy", "others='spans'"),
    "heads": ("retrieval_heads", "retrieval-heads", "all_heads=True"),
    "whole": ("head_taxonomy", "taxonomy", "whole=False"),
    "errors": ("layer_errors", "layer-errors", "errors=0"),
    "sentence": ("sentences", "sentences", "sentence=0"),
    "prior": ("retrieval_head", "retrieval-head", "prior=0"),
}
"""What a part reads: section of the profile, the step that makes it, and the option that does without."""

RELATIVE = 0.5
"""Of the model's best semantic score, what a head that retrieves reaches at the least."""

PART = "a share of at least 0, and less than 1 together with the other"

Part = Annotated[float, Allowed(lambda x: 0 <= x < 1, PART)]
Power = Annotated[float, Allowed(lambda x: 0 <= x <= 2, "a power from 0 to 2")]


@dataclass(frozen=True, eq=False)
class MixedRouter(SketchRouter):
    """A mixture of what the sketch gives each token by its own query, by the mean query of the sentence so far, and of what
    the retrieval head foretells: probabilities, added in shares.

    sentences: keeps a sentence's queries; None without them.
    """

    sentences: SentenceRouter | None = None
    sentence: float = 0.0
    prior: float = 0.0

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        mixed = super().score(site, q, spans, step) + math.log1p(-self.sentence - self.prior)
        if self.sentences is not None:
            theirs = super().score(site, self._means(site, step).to(q.device), spans, step)
            mixed = torch.logaddexp(mixed, theirs + math.log(self.sentence))
        if self.prior:
            told = SpeculativeRouter().score(site, q, spans, step)
            mixed = torch.logaddexp(mixed, told.to(mixed.device) + math.log(self.prior))
        return mixed

    def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
        """See `semkv.runtime.components.Bringer`."""
        brought: dict[str, Tensor] = {}
        if self.sentences is not None:
            brought |= self.sentences.bring(site, step, spans).tensors
        if self.prior:
            told = SpeculativeRouter().bring(site, step, spans)
            skipped = torch.tensor([told.skipped], dtype=torch.int64, device="cpu")
            brought |= {**told.tensors, "skipped": skipped}
        return Brought(brought)

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        own = super().scores(site, q, units)
        shift, mixed = units.passing.get("shift"), own + math.log1p(-self.sentence - self.prior)
        if self.sentences is not None:
            theirs = super().scores(site, mean_query(q, units), units)
            mixed = torch.logaddexp(mixed, theirs + math.log(self.sentence))
        if self.prior:
            ranking = units.tensors["ranking"]
            before = units.tensors["skipped"].view(-1, 1, 1) - 1
            place = torch.ones_like(own[:, :, 0], dtype=torch.int64).cumsum(-1) + before
            last = (units.count.view(-1, 1, 1) + before).clamp(min=0)
            told = ranking.gather(2, torch.minimum(place.clamp(min=0), last)).masked_fill(place < 0, float("-inf"))
            mixed = torch.logaddexp(mixed, told[:, :, None] + math.log(self.prior))
        if shift is not None:  # attention to what stays folded is by the query alone
            units.passing.update(shift=shift, own=own)
        return mixed

    def rest(
        self, site: AttentionSite, score: Tensor, chosen: Tensor, own: Tensor | None, units: Units
    ) -> tuple[Tensor, Tensor]:
        """See `semkv.runtime.components.Rest`."""
        return super().rest(site, units.passing["own"], chosen, own, units)

    def attend(
        self, site: AttentionSite, q: Tensor, score: Tensor, seen: Tensor, spans: UnitsView
    ) -> tuple[Tensor, Tensor] | None:
        own = super().score(site, q, spans, Step.alone(site, q))  # by the query alone, as attention is
        return super().attend(site, q, own, seen.to(own.device), spans)

    def _means(self, site: AttentionSite, step: Step) -> Tensor:
        """Mean queries [Hq, T, D] of the part `site`; the first part of a layer makes those of all heads."""
        assert self.sentences is not None
        name = f"sentence.means.{site.index}"
        if name not in step.passing:
            step.passing[name] = self.sentences.sentence_queries(step.site, step.q, step)
        means = step.passing[name]
        assert isinstance(means, Tensor)
        first = site.first_head * site.group_size
        return means[first : first + site.q_heads]


@dataclass(frozen=True)
class HeadKind:
    """Of one KV head: the role that says what it holds in place of codes, "" where its tokens have codes; or that it keeps every token."""

    role: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Mixed(Sketch):
    """Parts of several systems in one composition: heads that retrieve (CompressKV's scores say which) choose single
    tokens by their codes; all others have SeKV's spans, coarse in the softmax and unfolded by the trained gate. Parts of the
    other systems are off by default.

    Options of `sketch`, and: retrieves: a KV head retrieves when the best semantic score of its query heads reaches this share of
    attention, or half of the model's best score where that is less. all_heads: codes for every head. idle_share: of an even share of
    the budget, what a head without codes keeps. others: what those hold: `spans`; `window`, first and recent tokens; `votes`, what
    the prompt's end attends to; `roles`, votes for heads whose role (HeteroCache) is anchor and spans for all else. errors: their
    share of the budget goes with the error of their layer (CompressKV, Eq. 12) to this power. sentence: share of the mean query
    of the sentence (SentenceKV) in a sketch's choice. prior: share of the retrieval head's choice (SpeContext) in it; the
    head's keys, in 8 or 4 bits, are charged to the budget. whole: volatile heads and pivots (HeteroCache) keep every token on the
    device, and all others share what that leaves: for budgets of which those heads are a part.
    """

    retrieves: Share = 0.1
    all_heads: bool = False
    idle_share: Share = 0.3
    others: Literal["spans", "window", "votes", "roles"] = "spans"
    errors: Power = 0.0
    sentence: Part = 0.0
    prior: Part = 0.0
    whole: bool = False

    name: ClassVar[str] = "mixed"
    minimum_tokens: ClassVar[int] = 24
    keeps_less: ClassVar[str] = "whole=False"
    divides_heads: ClassVar[bool] = True
    steps: ClassVar[str] = "retrieval-heads,sketch,sekv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sentence + self.prior >= 1:
            raise self.wrong("sentence", PART)

    def check(self, profile: Profile | None) -> None:
        super().check(profile)
        assert profile is not None
        idle = not self.all_heads
        used = {"heads": idle, "spans": idle and self.others in ("spans", "roles"), "whole": self.whole}
        used |= {"roles": idle and self.others == "roles"}
        used |= {"errors": self.errors > 0, "sentence": self.sentence > 0, "prior": self.prior > 0}
        for part, wanted in used.items():
            section, step, without = NEEDED[part]
            if wanted and getattr(profile.info, section) is None:
                raise ConfigError(
                    f"method 'mixed' needs a profile with the section {section!r}: measure it with `semkv-profile MODEL --steps {step} "
                    f"-o OUT`, or do without by {without}"
                )

    def retrieval_head(self, profile: Profile | None) -> RetrievalHead | None:
        return SpeContext().retrieval_head(profile) if self.prior else None

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        plan = self._parts(program, profile)
        sentences = self._sentences(profile)
        if sentences is not None:
            plan = replace(plan, notes={**plan.notes, **sentences.notes(program)})
        head = self.retrieval_head(profile)
        if head is None:
            return plan
        ahead = Speculation.of(program, head.section, strict=True)
        return replace(
            plan,
            before=ahead,
            after_prompt=ahead,
            notes={**plan.notes, **ahead.notes()},
            features=head.section.feature_sites,
            charge=ahead.charge(),
        )

    def _parts(self, program: Program, profile: Profile | None) -> Plan:
        """Runs of heads with codes, without, and whole."""
        router = self.router(profile)
        found, idle = self.found(router), {}
        parts: dict[int, tuple[Runs, ...]] = {}
        together: dict[int, tuple[Runs, ...]] = {}
        roles = self.head_roles(program, profile)
        for number, own in enumerate(program.stores):
            if own.treatment != "method":
                continue
            site = own if own.among is None else own.grouped(None if roles is None else roles[number])
            kinds, weights, made, first = self._kinds(profile, site), self._weights(profile, site), [], 0
            for kind, run in groupby(kinds):
                last = first + len(list(run))
                if kind.whole:
                    made.append(Runs(first, last, Components(keeper=Sinks(self.sinks), whole=True)))
                elif kind.role and kind.role not in idle:
                    idle[kind.role] = self.idle(program, profile, kind.role)
                if not kind.whole:
                    share = sum(weights[first:last]) / sum(weights)
                    made.append(Runs(first, last, idle[kind.role] if kind.role else found, share))
                first = last
            parts[own.store] = tuple(made)
            if own.among is not None:
                together[own.store] = tuple(made)
                parts[own.store] = own_parts(made, site.head_order or range(site.kv_heads), own)
            for part in parts[own.store]:
                if part.components is found:
                    self.fill(router, profile, own, part.first, part.last)
        return Plan(parts, together=together)

    def router(self, profile: Profile | None) -> SketchRouter:
        if not self.sentence and not self.prior:
            return super().router(profile)
        return MixedRouter(sentences=self._sentences(profile), sentence=self.sentence, prior=self.prior)

    def idle(self, program: Program, profile: Profile | None, role: str) -> Components:
        """What heads of this role without codes hold."""
        if role == "window":
            return Components(keeper=Sinks(self.sinks), outside="dropped")
        if role == "votes":
            return Components(keeper=ObservationWindow(8, 5, "mean", self.window))
        return SeKV(coarse=True).components(program, profile)

    def head_roles(self, program: Program, profile: Profile | None) -> tuple[tuple[str, ...], ...] | None:
        """So that whole heads of a store stand side by side."""
        if not self.whole:
            return None
        assert profile is not None
        assert profile.info.head_taxonomy is not None
        return profile.info.head_taxonomy.roles

    def layer_shares(self, program: Program, profile: Profile | None) -> tuple[float, ...] | None:
        stores = [site.whole for site in program.stores]
        return tuple(max(1e-6, sum(self._weights(profile, site)) / site.kv_heads) for site in stores)

    def _kinds(self, profile: Profile | None, site: AttentionSite) -> list[HeadKind]:
        """The kind of each KV head in the order of the lowered program."""
        retrieving = None if self.all_heads else self._retrieving(profile, site)
        kinds = []
        for head in site.head_order or range(site.kv_heads):
            if self.whole and self._taxonomy_role(profile, site, head) in WHOLE:
                kinds.append(HeadKind(whole=True))
            elif retrieving is None or head in retrieving:
                kinds.append(HeadKind())
            else:
                kinds.append(HeadKind(self._role(profile, site, head)))
        return kinds

    def _weights(self, profile: Profile | None, site: AttentionSite) -> list[float]:
        """What each KV head gets of an even share of what whole heads leave, in the order of the lowered program."""
        if site.window:
            return [1.0] * site.kv_heads
        idle = self.idle_share * self._layer_weight(profile, site)
        return [0.0 if kind.whole else idle if kind.role else 1.0 for kind in self._kinds(profile, site)]

    def _retrieving(self, profile: Profile | None, site: AttentionSite) -> set[int]:
        """The KV heads of `site`, in the order of the user's model, that retrieve."""
        assert profile is not None
        assert profile.info.retrieval_heads is not None
        rows = profile.info.retrieval_heads.semantic
        bar = min(self.retrieves, RELATIVE * max(max(row, default=0.0) for row in rows))
        own = rows[site.index]
        groups = [own[at : at + site.group_size] for at in range(0, len(own), site.group_size)]
        return {head for head, scores in enumerate(groups) if max(scores) >= bar and max(scores) > 0}

    def _role(self, profile: Profile | None, site: AttentionSite, head: int) -> str:
        if self.others != "roles":
            return self.others
        return "votes" if self._taxonomy_role(profile, site, head) == "anchor" else "spans"

    def _taxonomy_role(self, profile: Profile | None, site: AttentionSite, head: int) -> str:
        """HeteroCache's role of a KV head of the user's model."""
        assert profile is not None
        assert profile.info.head_taxonomy is not None
        return profile.info.head_taxonomy.roles[_row_of(profile, site)][head]

    def _layer_weight(self, profile: Profile | None, site: AttentionSite) -> float:
        if not self.errors:
            return 1.0
        assert profile is not None
        assert profile.info.layer_errors is not None
        weights = [error**self.errors for error in profile.info.layer_errors.errors]
        return weights[_row_of(profile, site)] * len(weights) / sum(weights)

    def _sentences(self, profile: Profile | None) -> SentenceRouter | None:
        if not self.sentence:
            return None
        assert profile is not None
        return SentenceRouter(classes=profile.tensors["sentences.classes"])


def _row_of(profile: Profile, site: AttentionSite) -> int:
    """The row of a site's KV store in the profile's tables."""
    return [store.store for store in profile.info.model.stores].index(site.store)
