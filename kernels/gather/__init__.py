"""Tokens that a step lacks, read where they wait."""

from semkv.kernels.gather.reference import gather_tokens_reference

__all__ = ["gather_tokens_reference"]
