"""Which units a step unfolds: above a threshold, the best that fit a budget."""

from semkv.kernels.selection.reference import select_reference

__all__ = ["select_reference"]
