"""How much of what a head attends to most is still what it attended to when its satellites were chosen."""

from semkv.kernels.drift_overlap.reference import drift_overlap_reference

__all__ = ["drift_overlap_reference"]
