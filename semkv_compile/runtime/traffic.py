"""What decode steps moved and held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from semkv.runtime.site_memory import SiteMemory

SUMS = (
    "steps",
    "moved_bytes",
    "held_bytes",
    "peak_bytes",
    "peak_share",
    "device_share",
    "attended_share",
    "excess_share",
    "device_bytes",
    "attended_bytes",
    "excess_bytes",
    "full_bytes",
    "offloaded_bytes",
    "ahead_tokens",
    "ahead_bytes",
    "hit_tokens",
    "missed_tokens",
    "stalled_seconds",
)


@dataclass
class Traffic:
    """What decode steps did, summed over the steps of one row.

    steps: forward calls; moved_bytes: what steps unfolded and lacked, from the host tier to the device; held_bytes: of what steps unfolded,
    what was there from the step before and did not move; ahead_tokens, ahead_bytes: fetched before a layer's turn, lacked or not;
    hit_tokens: lacked and fetched before; missed_tokens: lacked and fetched by the step itself; stalled_seconds: time that steps
    stood still for folded tokens, waiting for a fetch under way or fetching themselves; peak_bytes: largest device residency of budgeted
    stores; peak_share: largest residency as a share of the budget at that step, of a store or of all; device_share, attended_share: the
    largest part of its full KV that a store held on the device, and that it read, in any step; excess_share: that it held beyond its cap;
    device_bytes, attended_bytes, excess_bytes, full_bytes: summed over steps and stores, whose ratios are the means; offloaded_bytes: from
    the device to the host, when layers left it; zooms: per site float32 [2, Hq], units unfolded and decisions taken.
    """

    steps: int = 0
    moved_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    peak_share: float = 0.0
    device_share: float = 0.0
    attended_share: float = 0.0
    excess_share: float = 0.0
    device_bytes: int = 0
    attended_bytes: int = 0
    excess_bytes: int = 0
    full_bytes: int = 0
    offloaded_bytes: int = 0
    ahead_tokens: int = 0
    ahead_bytes: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    stalled_seconds: float = 0.0
    zooms: dict[int, Tensor] = field(default_factory=dict)

    def supply(self, memories: Iterable[SiteMemory]) -> None:
        """Count what the turn of one layer took."""
        for memory in memories:
            took = memory.supplied
            self.ahead_tokens += took.fetched
            self.ahead_bytes += took.fetched * memory.spans.host_tokens.token_nbytes if memory.spans is not None else 0
            self.hit_tokens += took.hits
            self.missed_tokens += took.missed
            self.stalled_seconds += took.stalled_seconds

    def turn(self, held: float, attended: int, excess: int, full: int) -> None:
        """Count the turn of one store, whose full KV takes `full` bytes: `held` on the device, `excess` of them beyond its cap, `attended`
        read."""
        self.device_share = max(self.device_share, held / full)
        self.attended_share = max(self.attended_share, attended / full)
        self.excess_share = max(self.excess_share, excess / full)
        self.device_bytes += round(held)
        self.attended_bytes += attended
        self.excess_bytes += excess
        self.full_bytes += full

    def clone(self) -> Traffic:
        copy = Traffic(**{name: getattr(self, name) for name in SUMS})
        copy.zooms = {site: count.clone() for site, count in self.zooms.items()}
        return copy
