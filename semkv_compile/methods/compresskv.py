"""A layer's retrieval heads choose one set of tokens for all of its heads, and layer errors divide the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import OncePerPrompt
from semkv.methods.keepers import WindowKeeper
from semkv.methods.kept_and_runs import KeptAndRuns
from semkv.methods.options import Count, Queries, Tokens, TokensOrNone, Width
from semkv.methods.routers import CoarseRouter
from semkv.methods.window_scores import pooled, shared_votes
from semkv.profiles.schema import Profile
from semkv.profiles.schema.allocation import layer_budgets
from semkv.runtime.components import Components, Plan, Summary
from semkv.runtime.prompt.record import RowRecord

Selection = Literal["semantic", "classic", "classic_top_k", "all"]

MISSING = (
    "method 'compresskv' needs a profile with {}: measure them with `semkv-profile MODEL --steps {} -o OUT`, or run the ablation without "
    "them with method_options={{{}}}"
)


@dataclass(frozen=True)
class HeadVotes(WindowKeeper):
    """Attention of the chosen query heads, summed over the window, pooled, and averaged over those heads; one choice for
    all KV heads. heads: per KV store the query heads that choose, of all of the model's site; all of them where a store is missing."""

    alike: ClassVar[bool] = True
    heads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def scores(self, site: AttentionSite, record: RowRecord, tail: int) -> Tensor:
        weights = self.weights(site, record, tail).flatten(0, 1)
        if site.among is None:
            return shared_votes(weights, self.heads.get(site.store), self.kernel, self.pool)[None]
        chosen = self.heads.get(site.store)
        places = (
            range(site.q_heads)
            if chosen is None
            else [at for at, head in enumerate(site.among.query) if head in chosen]
        )
        count = site.among.kv_heads * site.group_size if chosen is None else len(chosen)
        votes = (
            pooled(weights[list(places)].sum(dim=1), self.kernel, self.pool).sum(dim=0)
            if len(places)
            else weights[0, 0] * 0
        )
        return (site.among.sum(votes.cpu()) / count)[None]


@dataclass(frozen=True)
class ErrorAllocation:
    """Alg. 1: `minimum` tokens for each layer, its window among them, and the rest by error, at most three times the mean. The
    errors are the shares of the annotated sites; where even the minimum does not fit, it is lowered."""

    minimum: int = 32

    def shares(self, stores: tuple[AttentionSite, ...], record: RowRecord, budget: float) -> tuple[float, ...]:
        total = max(len(stores), int(budget * len(stores)))
        errors = [store.budget_share for store in stores]
        sizes = layer_budgets(errors, total, minimum=self.minimum, scale_minimum=True)
        return tuple(size / total for size in sizes)


@dataclass(frozen=True)
class CompressKV(OncePerPrompt):
    """CompressKV (Lin et al., 2025): the semantic retrieval heads of a layer know which tokens matter, and layers that lose
    most under compression get most of the budget. Needs a profile with retrieval heads and layer errors.

    heads: query heads of a layer that choose. window: observing queries. kernel: width of the mean pooling, odd. recent: last
    tokens that stay exact. minimum: m, least tokens of a layer, its window among them; a layer that gets less than
    `minimum_tokens` (a page that was chosen, a page of the window and their positions) is raised to it. selection: the score
    that ranks heads: `semantic` (Eq. 5), `classic` (top-1), `classic_top_k`, or `all` (every head has a vote). allocation:
    `errors`, or `uniform`. recoverable: keep what the paper drops in the host tier, in spans of at most `span` tokens that
    unfold where a query is like their mean key; half of the budget is theirs.
    """

    heads: Count = 4
    window: Queries = 8
    kernel: Width = 5
    recent: TokensOrNone = 32
    minimum: Tokens = 32
    selection: Selection = "semantic"
    allocation: Literal["errors", "uniform"] = "errors"
    recoverable: bool = False
    span: Tokens = 16

    name: ClassVar[str] = "compresskv"
    minimum_tokens: ClassVar[int] = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recoverable:  # summaries and what unfolds need room as well
            object.__setattr__(self, "minimum_tokens", 40)

    def check(self, profile: Profile | None) -> None:
        missing = []
        if self.selection != "all" and (profile is None or profile.info.retrieval_heads is None):
            missing.append(("retrieval heads", "retrieval-heads", "'selection': 'all'"))
        if self.allocation == "errors" and (profile is None or profile.info.layer_errors is None):
            missing.append(("layer errors", "layer-errors", "'allocation': 'uniform'"))
        if missing:
            sections, steps, options = zip(*missing)
            raise ConfigError(MISSING.format(" and ".join(sections), ",".join(steps), ", ".join(options)))

    def components(self, program: Program, profile: Profile | None) -> Components:
        votes = self._votes(self._chosen(program, profile))
        if not self.recoverable:
            return Components(keeper=votes)
        segmenter = KeptAndRuns(votes, self.span)
        return Components(
            segmenter=segmenter,
            summary=Summary(weights="uniform", bits=4, attend=False),
            router=CoarseRouter(),
            outside="folded",
            fixed_share=1 / 2,
            floor_tokens=32,
            window=max(self.window, self.recent),
            window_share=1 / 4,
            fold_chunk=segmenter.fold_chunk,
        )

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        plan = super().plan(program, profile)
        return replace(plan, allocator=ErrorAllocation(self.minimum)) if self.allocation == "errors" else plan

    def layer_shares(self, program: Program, profile: Profile | None) -> tuple[float, ...] | None:
        """The layers' errors (Eq. 12), which `ErrorAllocation` turns into tokens."""
        if self.allocation == "uniform":
            return None
        self.check(profile)
        errors = profile.info.layer_errors.errors
        return tuple(max(error, 1e-6) for error in errors)

    def _votes(self, heads: Mapping[int, tuple[int, ...]]) -> HeadVotes:
        return HeadVotes(self.window, self.kernel, "mean", self.recent, heads)

    def _chosen(self, program: Program, profile: Profile | None) -> dict[int, tuple[int, ...]]:
        """The best `heads` query heads of each store's site, in the order that the lowered program has them."""
        if self.selection == "all":
            return {}
        self.check(profile)
        rows = getattr(profile.info.retrieval_heads, self.selection)
        chosen = {}
        for site in program.stores:
            scores = torch.tensor(rows[site.index], dtype=torch.float32, device="cpu")
            if site.head_order and site.among is None:
                scores = scores.unflatten(0, (site.kv_heads, site.group_size))[list(site.head_order)].flatten()
            best = scores.argsort(descending=True, stable=True)[: self.heads]
            chosen[site.store] = tuple(sorted(best.tolist()))
        return chosen
