"""Single tokens chosen by a calibrated low-rank, low-bit code of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.keepers import Sinks
from semkv.methods.page_routers import PageRouter
from semkv.methods.pages import Frame, Pages
from semkv.profiles.schema import Profile, SketchSection
from semkv.profiles.schema.codes import decode, encode
from semkv.runtime.components import Components, IndexPart, Part, Plan, Summary
from semkv.runtime.segments import Folding
from semkv.runtime.spans import FoldedSpans

MISSING = "method 'sketch' needs a profile with a token sketch: make one with `semkv-profile MODEL --steps retrieval-heads,sketch -o OUT`"


@dataclass(frozen=True)
class SketchMaps:
    """The sketch of one run of KV heads: query [Hkv, D, r], key [Hkv, D, r], mean and std [Hkv, r], `bits` per number."""

    query: Tensor
    key: Tensor
    mean: Tensor
    std: Tensor
    bits: int

    @property
    def rank(self) -> int:
        """r, numbers per token."""
        return self.key.shape[-1]


@dataclass(frozen=True, eq=False)
class SketchRouter(PageRouter):
    """q.k from the codes alone: (q A).decode(code(k B)), per token or for the best token of a page.

    maps: by (site index, first KV head) of the parts that it serves.
    """

    maps: dict[tuple[int, int], SketchMaps]

    def _maps(self, site: AttentionSite) -> SketchMaps:
        # Sites that share a store are routed with their own queries, and the codes were made with its owner's maps.
        return self.maps[site.store, site.first_head]

    def index(self, site: AttentionSite, summary: Summary | None) -> dict[str, IndexPart]:
        maps = self._maps(site)
        width = -(-maps.rank * maps.bits // 8)
        return {"codes": IndexPart(site.kv_heads, width, dtype=torch.uint8, merge="never")}

    def build(self, site: AttentionSite, folding: Folding, mean_k: Tensor | None) -> dict[str, Tensor]:
        maps = self._maps(site)
        levels = encode(folding.k.float() @ maps.key, maps.mean, maps.std, maps.bits)
        return {"codes": pack_levels(levels, maps.bits)}

    def logits(self, site: AttentionSite, q: Tensor, spans: FoldedSpans) -> Tensor:
        maps = self._maps(site)
        levels = unpack_levels(spans.index["codes"], maps.bits, maps.rank)  # type: ignore[arg-type]
        return (q @ maps.query) @ decode(levels, maps.mean, maps.std, maps.bits).transpose(1, 2)


def pack_levels(levels: Tensor, bits: int) -> Tensor:
    """Levels int8 [..., r] in [-2^(bits-1), 2^(bits-1)) -> uint8 [..., ceil(r * bits / 8)], the lowest bit first."""
    raised = (levels.to(torch.int16) + (1 << (bits - 1)))[..., None]
    stream = ((raised >> torch.arange(bits, dtype=torch.int16)) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (stream << torch.arange(8, dtype=torch.int16)).sum(-1).to(torch.uint8)


def unpack_levels(packed: Tensor, bits: int, rank: int) -> Tensor:
    """The levels int8 [..., rank] of `pack_levels`."""
    if 8 % bits == 0:  # codes do not straddle bytes
        parts = (packed[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8)) & ((1 << bits) - 1)
        return parts.flatten(-2)[..., :rank].to(torch.int8) - (1 << (bits - 1))
    stream = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)[..., : rank * bits]
    places = torch.tensor([1 << place for place in range(bits)], dtype=torch.int16)
    return ((stream.unflatten(-1, (rank, bits)) * places).sum(-1) - (1 << (bits - 1))).to(torch.int8)


@dataclass(frozen=True)
class Sketch(Method):
    """The token sketch: every token of a retrieving KV head has a code of a few bytes on the device; the best are unfolded.

    Calibration finds, per KV head, the best approximation of q.k of rank r under the measured covariances, and the rank
    and bits that find the attention (`semkv.profiles.schema.SketchSection`). Heads that do not retrieve get none: they keep
    their first and recent tokens.

    rank, bits: of every sketch; 0: the profile's own per head. all_heads: sketch heads that do not retrieve as well.
    idle_share: of an even share of the budget, what a head without a sketch keeps. sinks, window: exact tokens of heads with a
    sketch. fixed_share: of their budget, for codes and exact tokens.
    """

    rank: int = 0
    bits: int = 0
    all_heads: bool = False
    idle_share: float = 0.12
    sinks: int = 4
    window: int = 32
    fixed_share: float = 1 / 2

    name: ClassVar[str] = "sketch"
    minimum_tokens: ClassVar[int] = 24

    def __post_init__(self) -> None:
        for name, sound, expected in (
            ("bits", 0 <= self.bits <= 8, "1 to 8, or 0 for the profile's own"),
            ("idle_share", 0 < self.idle_share <= 1, "a share in (0, 1]"),
            ("fixed_share", 0 < self.fixed_share <= 1, "a share in (0, 1]"),
            ("window", self.window >= 1, "at least 1 token"),
        ):
            if not sound:
                raise ConfigError(f"option {name!r} of method 'sketch' is {getattr(self, name)!r}; expected {expected}")

    def check(self, profile: Profile | None) -> None:
        if profile is None or profile.info.sketch is None:
            raise ConfigError(MISSING)

    def components(self, program: Program, profile: Profile | None) -> Components:
        return self.plan(program, profile).all_components()[0]

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        section = self._section(profile)
        frame = Frame(self.sinks, self.window)
        router = SketchRouter({})
        found = Components(
            segmenter=Pages(1, frame, fixed=True), router=router, outside="folded", fixed_share=self.fixed_share,
            floor_tokens=16, window=self.window, window_share=frame.share, fold_chunk=frame.fold_chunk,
        )  # fmt: skip
        idle = Components(keeper=Sinks(self.sinks), outside="dropped")
        parts: dict[int, tuple[Part, ...]] = {}
        for site in program.stores:
            if site.treatment != "method":
                continue
            total = sum(self._weights(section, site))
            made = []
            for first, last, rank, bits in self._runs(section, site):
                share = (last - first) * (1.0 if rank else self.idle_share) / total
                made.append(Part(first, last, found if rank else idle, share))
                if rank:
                    router.maps[site.store, first] = self._maps(profile, site, first, last, rank, bits)
            parts[site.store] = tuple(made)
        return Plan(parts)

    def layer_shares(self, program: Program, profile: Profile | None) -> tuple[float, ...] | None:
        section = self._section(profile)
        return tuple(sum(self._weights(section, site)) / site.kv_heads for site in program.stores)

    def _section(self, profile: Profile | None) -> SketchSection:
        self.check(profile)
        assert profile is not None
        assert profile.info.sketch is not None
        return profile.info.sketch

    def _kinds(self, section: SketchSection, site: AttentionSite) -> list[tuple[int, int]]:
        """(rank, bits) of each KV head in the order of the lowered program; rank 0 has no sketch."""
        order = site.head_order or tuple(range(site.kv_heads))
        kinds = []
        for head in order:
            rank, bits = section.ranks[site.index][head], section.bits[site.index][head]
            if rank or self.all_heads:
                rank = min(self.rank or rank or section.rank, section.rank, site.key_dim)
                bits = self.bits or bits or 4
            kinds.append((rank, bits))
        return kinds

    def _weights(self, section: SketchSection, site: AttentionSite) -> list[float]:
        if site.window:
            return [1.0] * site.kv_heads
        return [1.0 if rank else self.idle_share for rank, _ in self._kinds(section, site)]

    def _runs(self, section: SketchSection, site: AttentionSite) -> Iterator[tuple[int, int, int, int]]:
        """(first, last, rank, bits) of neighbouring KV heads that are alike."""
        first = 0
        for (rank, bits), run in groupby(self._kinds(section, site)):
            last = first + len(list(run))
            yield first, last, rank, bits
            first = last

    def _maps(
        self, profile: Profile | None, site: AttentionSite, first: int, last: int, rank: int, bits: int
    ) -> SketchMaps:
        assert profile is not None
        order = list(site.head_order or range(site.kv_heads))[first:last]
        names = ("query", "key", "mean", "std")
        query, key, mean, std = (profile.tensors[f"sketch.{name}.{site.index}"].float()[order] for name in names)
        return SketchMaps(query[..., :rank], key[..., :rank], mean[..., :rank], std[..., :rank], bits)
