"""Tokens that a step lacks, read where they wait."""

from semkv.kernels.gather.reference import copy_tokens_reference

__all__ = ["copy_tokens_reference"]
