"""How unexpected each token was, without logits of the whole vocabulary in memory."""

from semkv.kernels.surprisal.reference import surprisal_reference

__all__ = ["surprisal_reference"]
