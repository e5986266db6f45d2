"""A few layers look at everything and choose the tokens for the layers after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir import state_ops
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.options import Count, IndexBits, Tokens, TokensOrNone
from semkv.methods.page_routers import MeanKeyRouter
from semkv.methods.pages import Frame, Pages
from semkv.methods.pivots import keys_of, logits_on
from semkv.methods.routers import MeansSuffice
from semkv.methods.window_scores import CHUNK_SCORES
from semkv.profiles.schema import Profile
from semkv.runtime.components import Brought, Components, ExactKeys, Part, Plan
from semkv.runtime.decode.units import Units
from semkv.runtime.step import Step
from semkv.runtime.views import UnitsView

DENSE = 2
"""First layers that never filter, where there are enough: the paper's first filter is the third layer."""


@dataclass(frozen=True, eq=False)
class FilterRouter(MeansSuffice):
    """Tokens in the order of the attention that a filter layer gives them in this step; units are single tokens.

    leaders: by KV store, the site whose attention decides; a filter layer may decide for itself.
    """

    leaders: Mapping[int, int]

    def stored(self, step: Step) -> None:
        step.passing[f"omnikv.{step.site.index}"] = highest_weights(step)

    @property
    def of_tokens(self) -> bool:
        """See `semkv.runtime.components.OfTokens`."""
        return True

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        return {}

    def names(self, site: AttentionSite) -> tuple[str, ...]:
        """See `semkv.runtime.components.Passer`."""
        return (f"omnikv.{site.index}",)

    def passed(
        self, site: AttentionSite, q: Tensor, held: Sequence[ExactKeys], asked: Tensor, places: Tensor
    ) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Passer`: `highest_weights` of all tokens, by position."""
        logits, positions = [], []
        for keys in held:
            own = state_ops.products(q * site.scale, keys.k, keys.scale, 16 if keys.scale is None else 8)
            own = site.softcap * torch.tanh(own / site.softcap) if site.softcap else own
            at = keys.positions.expand(-1, site.kv_heads, -1)
            logits.append(own.masked_fill((at > asked[:, :, None])[:, :, None], float("-inf")))
            positions.append(at)
        mass = torch.stack([own.logsumexp(-1) for own in logits]).logsumexp(0)[..., None]
        found = torch.zeros_like(places)
        for own, at in zip(logits, positions):
            weights = (own - mass).exp().amax(2)  # [B, Hkv, n]; heads may hold other tokens
            index = torch.minimum(at.long(), asked[:, :, None] + 1)  # what is no token goes behind all of them
            rows, index, weights = len(index), index.contiguous(), weights.contiguous()
            found = found.scatter_reduce(1, index.view(rows, -1), weights.view(rows, -1), "amax")
        return {self.names(site)[0]: found if site.among is None else site.among.ranks.reduce(found, "max")}

    def taken(self, site: AttentionSite) -> tuple[str, ...]:
        """See `semkv.runtime.components.Taker`."""
        return (f"omnikv.{self.leaders[site.store]}",)

    def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
        """See `semkv.runtime.components.Bringer`: scores are of all tokens, of which the first ones are no units."""
        skipped = spans.places.start + spans.places.shift
        return Brought({"first": torch.tensor([skipped], dtype=torch.int64, device="cpu")}, skipped)

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        weights = units.tensors[self.taken(site)[0]]
        before = torch.ones_like(weights, dtype=torch.int64).cumsum(-1) <= units.tensors["first"]
        return weights.masked_fill(before, float("-inf"))[:, None, None].expand(-1, site.kv_heads, -1, -1)

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        weights: Tensor = step.passing[f"omnikv.{self.leaders[site.store]}"]  # type: ignore[assignment]
        return weights[:, spans.positions[0].long()].expand(site.q_heads, -1, -1)

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), float("-inf"), dtype=torch.float32, device="cpu")


def highest_weights(step: Step) -> Tensor:
    """float32 [T, n]: the largest softmax weight that any query head of the step's site gives to each of the row's n tokens,
    wherever they are; 0 where a token is later than the query."""
    site, first = step.site, step.tokens
    n = first + len(step.ids)
    chunk = max(1, CHUNK_SCORES // (site.group_size * n))
    most = torch.zeros(len(step.ids), n, dtype=torch.float32, device="cpu")
    for head in range(site.kv_heads):
        own = site.part(head, head + 1, 1.0)
        keys = keys_of(step, own)
        for new in torch.arange(len(step.ids), dtype=torch.int64, device="cpu").split(chunk):
            hidden = torch.arange(n, dtype=torch.int64, device="cpu") > (first + new)[:, None]
            logits = logits_on(keys, own, step.q[own.query_heads][:, new], step)
            weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
            most[new] = torch.maximum(most[new], weights.amax(dim=(0, 1)))
    return most if site.among is None else site.among.ranks.reduce(most, "max")


@dataclass(frozen=True)
class OmniKV(Method):
    """OmniKV (Hao et al., 2025): neighbouring layers need much the same tokens, so a filter layer, which keeps everything,
    chooses at every step what the layers up to the next filter read. A token's score is the largest weight that any of the
    filter's heads gives it for the query; all heads and layers that follow read the same tokens, as many as the budget holds.

    filter_layers: numbers of the layers that filter, ascending; layers before the first keep everything too. Empty: one in
    `layers_per_filter` layers, the one that retrieves best by the profile's semantic scores, or the first of them where the
    profile has none. sinks, recent: first and last tokens that stay exact in the layers that follow. strict: no layer keeps
    everything, so that any budget will do: filters wait on the host like the layers that follow, where their attention to all
    tokens is computed, and the layers before them in pages of `page` tokens, chosen by their mean keys of `bits` bits.
    """

    filter_layers: tuple[int, ...] = ()
    layers_per_filter: Count = 10
    sinks: TokensOrNone = 4
    recent: Tokens = 32
    strict: bool = False
    page: Tokens = 8
    bits: IndexBits = 4

    name: ClassVar[str] = "omnikv"
    minimum_tokens: ClassVar[int] = 40
    keeps_less: ClassVar[str] = "strict=True"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.filter_layers, list):  # as JSON has it
            object.__setattr__(self, "filter_layers", tuple(self.filter_layers))
        layers = self.filter_layers
        sound = isinstance(layers, tuple) and all(type(x) is int and x >= 0 for x in layers)
        if not sound or list(layers) != sorted(set(layers)):
            raise self.wrong("filter_layers", "numbers of layers in ascending order, such as [2, 8, 18]")

    def components(self, program: Program, profile: Profile | None) -> Components:
        return self.plan(program, profile).all_components()[-1]

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        filters = self.filters(program, profile)
        stores = [site for site in program.stores if site.treatment == "method"]
        router = FilterRouter(
            {site.store: max(f for f in filters if f <= site.index) for site in stores if site.index >= filters[0]}
        )
        frame = Frame(self.sinks, self.recent, fold_chunk=max(8, self.page if self.strict else 1))
        folded = {
            "outside": "folded",
            "fixed_share": 1 / 2,
            "floor_tokens": 32,
            "window": self.recent,
            "window_share": frame.share,
            "fold_chunk": frame.fold_chunk,
        }
        following = Components(segmenter=Pages(1, frame, fixed=True), router=router, host_form="raw", **folded)  # type: ignore[arg-type]
        whole = Components(whole=True)
        dense = Components(segmenter=Pages(self.page, frame), router=MeanKeyRouter(self.bits), **folded)  # type: ignore[arg-type]
        parts = {}
        for site in stores:
            if site.index < filters[0]:
                made = dense if self.strict else whole
            else:
                made = whole if site.index in filters and not self.strict else following
            parts[site.store] = (Part(0, site.kv_heads, made),)
        return Plan(parts, at_site=dict.fromkeys(filters, router))

    def filters(self, program: Program, profile: Profile | None) -> tuple[int, ...]:
        """The layers that filter, ascending; `ConfigError` where the model has no such layer to compress."""
        layers = [site.index for site in program.stores if site.treatment == "method"]
        if not layers:
            return (0,)
        if self.filter_layers:
            unknown = [x for x in self.filter_layers if x not in layers]
            if unknown:
                raise ConfigError(
                    f"option 'filter_layers' of method 'omnikv' has {unknown[0]}; expected some of this model's layers "
                    f"{', '.join(map(str, layers))}"
                )
            return self.filter_layers
        first = min(DENSE, len(layers) // 4)
        count = max(1, len(layers) // self.layers_per_filter)
        edges = [first + place * (len(layers) - first) // count for place in range(count + 1)]
        heads = profile.info.retrieval_heads if profile is not None else None
        scores = {x: 0.0 if heads is None else max(heads.semantic[x]) for x in layers}
        return tuple(max(layers[start:end], key=scores.__getitem__) for start, end in pairwise(edges))
