"""What decode steps moved and held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semkv.ir.site import AttentionSite

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
)


@dataclass
class Traffic:
    """What decode steps did, summed over the steps of one row.

    steps: forward calls; moved_bytes: what steps unfolded and lacked, from the host tier to the device; held_bytes: of what steps unfolded,
    what was there from the step before and did not move; peak_bytes: largest device residency of budgeted stores; peak_share: largest
    residency as a share of the budget at that step, of a store or of all; device_share, attended_share: the largest part of its full KV
    that a store held on the device, and that it read, in any step; excess_share: that it held beyond its cap; device_bytes, attended_bytes,
    excess_bytes, full_bytes: summed over steps and stores, whose ratios are the means; offloaded_bytes: from the device to the host, when
    layers left it; zooms: per site and query head, units unfolded and decisions taken.
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
    zooms: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

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

    def zoomed(self, site: AttentionSite, first: int, read: Sequence[int], taken: int) -> None:
        """Count the units that query heads of a site, from `first` on, have read, of so many decisions each."""
        if site.index not in self.zooms:
            self.zooms[site.index] = [0] * site.q_heads, [0] * site.q_heads
        unfolded, decisions = self.zooms[site.index]
        for head, units in enumerate(read, first):
            unfolded[head] += units
            decisions[head] += taken

    def clone(self) -> Traffic:
        copy = Traffic(**{name: getattr(self, name) for name in SUMS})
        copy.zooms = {site: (unfolded[:], decisions[:]) for site, (unfolded, decisions) in self.zooms.items()}
        return copy
