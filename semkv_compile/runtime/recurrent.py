"""States of recurrent sites, of several rows in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv.runtime.row_memory import RowMemory


def stacked_states(rows: Sequence[RowMemory], site: int) -> list[Tensor]:
    """The states [B, ...] of a site, of B rows; the row's own where there is one. Of a site that chooses the index keys of each row."""
    each = [row.recurrent[site] for row in rows]
    if rows[0].placement.program.recurrences[site].chooses:
        return [keys for (keys,) in each]
    return each[0] if len(each) == 1 else [torch.cat(own) for own in zip(*each)]


def keep_states(rows: Sequence[RowMemory], site: int, states: Sequence[Tensor]) -> None:
    """Write states [B, ...] to those of the rows."""
    if rows[0].placement.program.recurrences[site].chooses:
        for row, keys in zip(rows, states, strict=True):
            row.recurrent[site] = [keys]
        return
    for r, row in enumerate(rows):
        for held, new in zip(row.recurrent[site], states, strict=True):
            held.copy_(new[r : r + 1])


__all__ = ["keep_states", "stacked_states"]
