"""Truncated SVD of many small matrices at once (SeKV Eq. 6)."""

from semkv.kernels.low_rank.randomized import randomized_svd
from semkv.kernels.low_rank.reference import truncated_svd_reference

__all__ = ["randomized_svd", "truncated_svd_reference"]
