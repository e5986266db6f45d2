"""SeKV's gate: which folded spans a query needs."""

from semkv.kernels.gate_scores.reference import gate_scores_reference

__all__ = ["gate_scores_reference"]
