"""Scores of folded tokens from their codes alone."""

from semkv.kernels.sketch_scores.reference import sketch_scores_reference

__all__ = ["sketch_scores_reference"]
