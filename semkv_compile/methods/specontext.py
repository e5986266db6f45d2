"""Tokens chosen before the first layer by a small head that foretells what the model will attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.methods.base import Method
from semkv.methods.options import Tokens, TokensOrNone
from semkv.methods.pages import Frame, Pages
from semkv.methods.routers import OracleRouter
from semkv.methods.speculation import Speculation, SpeculativeRouter
from semkv.profiles.schema import Profile
from semkv.profiles.schema.retrieval_head import PREFIX, RetrievalHead
from semkv.runtime.components import Components, Plan

MISSING = "method 'specontext' needs a profile with a retrieval head: make one with `semkv-profile MODEL --steps retrieval-head -o OUT`"


@dataclass(frozen=True)
class SpeContext(Method):
    """SpeContext (Xu et al., 2025): a retrieval head, the queries and keys of a one-layer model, reads each new token before the
    first layer does and chooses, per KV head, the tokens that all layers attend to. Needs a profile with a retrieval head.

    retrieval: `head`; `layers`: no retrieval head, every layer looks through its own keys for every query (ablation of C1, and
    what layer-wise retrieval can find at best). selection: one choice per KV head, or one for the whole `batch` of heads
    (Fig. 5a). sinks, window: first and last tokens that stay exact. strict: the head's keys in 8 or 4 bits, so that they take
    at most half of the budget; where 4 bits do not fit, the newest tokens have keys, and only they are chosen.
    """

    retrieval: Literal["head", "layers"] = "head"
    selection: Literal["head", "batch"] = "head"
    sinks: TokensOrNone = 4
    window: Tokens = 64
    strict: bool = False

    name: ClassVar[str] = "specontext"
    minimum_tokens: ClassVar[int] = 40
    keeps_less: ClassVar[str] = "strict=True"

    def check(self, profile: Profile | None) -> None:
        if self.retrieval == "head" and (profile is None or profile.info.retrieval_head is None):
            raise ConfigError(MISSING)

    def retrieval_head(self, profile: Profile | None) -> RetrievalHead | None:
        self.check(profile)
        if self.retrieval == "layers" or profile is None or profile.info.retrieval_head is None:
            return None
        tensors = {name.removeprefix(PREFIX): x for name, x in profile.tensors.items() if name.startswith(PREFIX)}
        return RetrievalHead(profile.info.retrieval_head, tensors)

    def components(self, program: Program, profile: Profile | None) -> Components:
        frame = Frame(self.sinks, self.window)
        router = SpeculativeRouter() if self.retrieval == "head" else OracleRouter()
        return Components(
            segmenter=Pages(1, frame),
            router=router,
            host_form="raw",
            outside="folded",
            fixed_share=1 / 2,
            floor_tokens=16,
            window=self.window,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
        )

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        plan, head = super().plan(program, profile), self.retrieval_head(profile)
        if head is None:
            return plan
        if program.selector is None:
            raise ConfigError("method 'specontext' needs the retrieval head in the program: compile or save it again")
        speculation = Speculation.of(program, head.section, strict=self.strict, batch=self.selection == "batch")
        return Plan(
            plan.parts,
            before=speculation,
            notes=speculation.notes(),
            after_prompt=speculation,
            features=head.section.feature_sites,
            charge=speculation.charge(),
        )
