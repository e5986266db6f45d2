"""Single tokens chosen by a code of their keys in a few bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.options import CountOrProfile, Share, ShareOrBudget, Tokens, TokensOrNone
from semkv.methods.pages import Frame, Pages
from semkv.methods.routers import OracleRouter
from semkv.methods.sketch_router import SketchRouter
from semkv.profiles.schema import Profile, SketchSection
from semkv.profiles.schema.codes import KeyBalance
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.components import Components, Part, Plan

MISSING = "method {!r} needs a profile with a token sketch: make one with `semkv-profile MODEL --steps {} -o OUT`"


FIRST = 2
"""Bytes of a key that come before any of its value."""
CODES, MOST_CODES, LEAST = 0.4, 0.55, 3
"""Share of a budget for codes, and the most of it for keys of so many bytes beside their values."""
BESIDE = 0.2
"""Share of a budget that sinks and the window may take beside codes."""
FEW = 0.045
"""Of the tokens of a context: where 8 bits hold fewer exact ones than that, 4 bits do."""


@dataclass(frozen=True)
class Sketch(Method):
    """The token sketch: the device has a code of every folded token's key, in a few bytes; a step unfolds those that score best by it.
    All others are attended to through their codes, and a byte for their values.

    A code is a byte per stage: the number of the nearest vector in a codebook that calibration learned for this KV head
    (`semkv.profiles.schema.codes.Codebooks`). Codebooks are weights of the model, a token's code counts towards the budget.

    stages: bytes of a key's code; 0: as many as `code_share` of the budget holds, at most the profile's. coarse: attend to tokens that
    stay folded, where the same share holds a value's byte beside two of the key's; where not, they are not in the softmax. sinks,
    window: exact tokens, first and recent. fixed_share: of the budget, for codes and exact tokens; the rest is for unfolded ones.
    code_share: of the budget, for codes; 0: 0.4, and of small budgets as much more, up to 0.55, as keys of three bytes take, with
    `fixed_share` raised to leave the other exact tokens their room. exact_form: of exact and unfolded tokens on the device, `int4` or
    `int8` with a scale per token and KV head, or `raw`, of which a budget holds fewest; `auto`: `int8` where the budget holds 4.5 % of a
    context in it, else `int4`; sinks beside 4 bits have 8. oracle: true attention chooses in place of codes, which are neither made nor
    charged: the ceiling of any choice of single tokens with this budget, not a method.
    """

    stages: CountOrProfile = 0
    coarse: bool = True
    sinks: TokensOrNone = 4
    window: Tokens = 32
    fixed_share: Share = 2 / 3
    code_share: ShareOrBudget = 0.0
    exact_form: Literal["auto", "int4", "int8", "raw"] = "auto"
    oracle: bool = False

    name: ClassVar[str] = "sketch"
    minimum_tokens: ClassVar[int] = 24
    steps: ClassVar[str] = "sketch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.code_share > self.fixed_share:
            raise self.wrong("code_share", f"a share in (0, fixed_share ({self.fixed_share:.3g})]")

    def check(self, profile: Profile | None) -> None:
        section = profile.info.sketch if profile is not None else None
        if section is None:
            raise ConfigError(MISSING.format(self.name, self.steps))
        if self.stages > section.stages:
            raise self.wrong(
                "stages", f"at most {section.stages}, which the profile has, or 0 for a number by the budget"
            )

    def for_budget(self, program: Program, profile: Profile | None, budget: Budget) -> Method:
        """With codes that the budget holds: two bytes of a key, one of its value, then the key's others. Of a number of tokens nobody knows
        which fraction it is, and half of the profile's stages are taken."""
        section = self._section(profile)
        if not isinstance(budget.value, float):
            stages = -(-section.stages // 2) if budget.value else section.stages
            return replace(self, stages=self.stages or stages, exact_form=self._form("int8"))
        stores = [site for site in program.stores if not site.window]
        token = budget.value * min(budget.dtype.itemsize * (site.key_dim + site.value_dim) for site in stores)
        whole = LEAST + section.value_stages
        share = self.code_share or min(max(CODES, whole / token), MOST_CODES)
        held = max(1, int(share * token + 1e-6))
        coarse = self.coarse and held >= FIRST + section.value_stages
        stages = self.stages or min(section.stages, held - coarse * section.value_stages)
        fixed = self.fixed_share if self.code_share else max(self.fixed_share, share + BESIDE)
        codes = stages + coarse * section.value_stages
        exact = (token - codes) / max(site.key_dim + site.value_dim + 4 for site in stores)
        form = self._form("int8" if exact >= FEW else "int4")
        return replace(self, stages=stages, coarse=coarse, code_share=share, fixed_share=fixed, exact_form=form)

    def _form(self, best: Literal["int4", "int8"]) -> Literal["int4", "int8", "raw"]:
        return best if self.exact_form == "auto" else self.exact_form

    def components(self, program: Program, profile: Profile | None) -> Components:
        return self.found(self.router(profile))

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        router = self.router(profile)
        found, parts = self.found(router), {}
        for site in program.stores:
            if site.treatment == "method":
                self.fill(router, profile, site, 0, site.kv_heads)
                parts[site.store] = (Part(0, site.kv_heads, found),)
        return Plan(parts)

    def found(self, router: SketchRouter) -> Components:
        """The composition of heads whose tokens have codes."""
        frame = Frame(self.sinks, self.window)
        return Components(
            segmenter=Pages(1, frame, fixed=True),
            router=OracleRouter() if self.oracle else router,
            exact_form=self._form("int8"),
            kept_form="int8" if self.exact_form == "int4" else None,
            host_form="int4" if self.exact_form == "int4" else "int8",
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=16,
            window=self.window,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
        )

    def router(self, profile: Profile | None) -> SketchRouter:
        """What chooses tokens; `plan` fills in its books."""
        return SketchRouter()

    def fill(self, router: SketchRouter, profile: Profile | None, site: AttentionSite, first: int, last: int) -> None:
        """Give `router` the books of KV heads [first, last) in the order of the lowered program."""
        heads = list(site.head_order or range(site.kv_heads))[first:last]
        section = self._section(profile)
        assert profile is not None
        books = section.codebooks(profile.tensors, site.index, heads, self.stages or section.stages)
        balance = self._balance(profile, site)
        router.books[site.store, first] = books if balance is None else books.balanced(balance.heads(heads))
        if self.coarse and not self.oracle:
            values = section.value_codebooks(profile.tensors, site.index, heads, section.value_stages)
            router.values[site.store, first] = values

    def key_balance(self, program: Program, profile: Profile | None) -> dict[int, KeyBalance] | None:
        """What fits keys into 4 bits: the scale per vector that 8 bits have does without."""
        if self.exact_form != "int4":
            return None
        counted = {site.store for site in program.sites if not site.window}
        stores = [site for site in program.stores if site.store in counted]
        return {site.store: found for site in stores if (found := self._balance(profile, site)) is not None}

    def _balance(self, profile: Profile | None, site: AttentionSite) -> KeyBalance | None:
        if self.exact_form != "int4":
            return None
        assert profile is not None
        found = self._section(profile).balance(profile.tensors, site.index)
        return found if site.shifts_freely else replace(found, mean=torch.zeros_like(found.mean))

    def _section(self, profile: Profile | None) -> SketchSection:
        self.check(profile)
        assert profile is not None
        assert profile.info.sketch is not None
        return profile.info.sketch
