"""What decode steps moved and held."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

SUMS = ("steps", "moved_bytes", "held_bytes", "peak_bytes", "peak_share", "offloaded_bytes")


@dataclass
class Traffic:
    """What decode steps did, summed over the steps of one row.

    steps: forward calls; moved_bytes: from the host tier to the device; held_bytes: of what steps unfolded, what was there
    from the step before and did not move; peak_bytes: largest device residency of budgeted
    stores; peak_share: largest residency as a share of the budget at that step; offloaded_bytes: from the device to the host,
    when layers left it; zooms: per site float32 [2, Hq], units unfolded and decisions taken.
    """

    steps: int = 0
    moved_bytes: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    peak_share: float = 0.0
    offloaded_bytes: int = 0
    zooms: dict[int, Tensor] = field(default_factory=dict)

    def clone(self) -> Traffic:
        copy = Traffic(**{name: getattr(self, name) for name in SUMS})
        copy.zooms = {site: count.clone() for site, count in self.zooms.items()}
        return copy
