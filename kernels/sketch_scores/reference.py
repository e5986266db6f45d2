"""Sketch scores written for reading: each stage's number is looked up, and they are added."""

from __future__ import annotations

from torch import Tensor


def sketch_logits_reference(tables: Tensor, codes: Tensor) -> Tensor:
    """Sums [H, R, M] of what codes uint8 [H, M, S] find in tables [H, R, S, V], in the tables' dtype, stage after stage.

    H KV heads, R rows of queries, M folded tokens, S stages (`semkv.profiles.schema.codes.Codebooks.tables`).
    """
    found = tables.new_zeros(*tables.shape[:2], codes.shape[1])
    for stage in range(codes.shape[2]):
        at = codes[:, None, :, stage].long().expand(-1, tables.shape[1], -1)
        found += tables[:, :, stage].gather(-1, at)
    return found
