"""Single tokens chosen by the model's own indexer, where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.options import Share, Tokens
from semkv.methods.pages import Frame, Pages
from semkv.methods.routers import MeansSuffice
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components
from semkv.runtime.step import CHOSEN, Step
from semkv.runtime.views import UnitsView


@dataclass(frozen=True)
class OwnChoice(MeansSuffice):
    """The places that the model's indexer gave for this step, in its order; no other unit is unfolded."""

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        """See `semkv.runtime.components.Router.score`."""
        chosen = step.passing[CHOSEN]
        assert isinstance(chosen, Tensor)
        tokens, count = chosen.shape
        unit = chosen.cpu().long() - (spans.places.start + spans.places.shift)
        unit = torch.where((unit < 0) | (unit >= spans.count), spans.count, unit)
        rank = torch.arange(count, 0, -1, dtype=torch.float32, device="cpu").expand(tokens, -1)
        score = torch.full((tokens, spans.count + 1), float("-inf"), dtype=torch.float32, device="cpu")
        score.scatter_(1, unit, rank)
        return score[:, :-1].expand(site.q_heads, -1, -1).contiguous()

    def threshold(self, site: AttentionSite) -> Tensor:
        """See `semkv.runtime.components.Router.threshold`."""
        return torch.zeros(site.q_heads, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Indexer(Method):
    """The selection that a model with sparse attention makes itself (DeepSeek V3.2's indexer and its kin): all tokens but a recent window
    wait on the host, and a step fetches those that the model chose. Where the budget has room for as many as it chooses, its output is the
    model's own.

    window: recent tokens on the device. fixed_share: of the budget, for them; the rest is for fetched tokens. The indexer's keys, one of
    each token and indexer, stay on the device beside the budget (`nbytes["recurrent"]`).
    """

    window: Tokens = 16
    fixed_share: Share = 1 / 3

    name: ClassVar[str] = "indexer"
    minimum_tokens: ClassVar[int] = 24
    needs_indexer: ClassVar[bool] = True

    def components(self, program: Program, profile: Profile | None) -> Components:
        without = [site.name for site in program.sites if site.treatment == "method" and site.chooser < 0]
        if without:
            raise ConfigError(
                f"method 'indexer' reads what the model's own indexer chooses, and {without[0]} has none: "
                "use another method, such as 'quest'"
            )
        frame = Frame(0, self.window)
        return Components(
            segmenter=Pages(1, frame, fixed=True),
            router=OwnChoice(),
            host_form="raw",
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=16,
            window=self.window,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
            unit=1,
        )


__all__ = ["Indexer", "OwnChoice"]
