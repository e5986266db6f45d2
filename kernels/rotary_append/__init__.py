"""Rotary embedding of a step's queries and keys, and its keys and values into their slots."""

from semkv.kernels.rotary_append.reference import rotary_append_reference

__all__ = ["rotary_append_reference"]
