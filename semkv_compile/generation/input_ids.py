"""Token ids, masks and positions as callers give them, and each row's own tokens in them."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError


def real_tokens(ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Each row's tokens [n] of ids [B, T], without the padding on the left or on the right where the mask [B, T] is 0.

    Raises
    ------
    InputError: no ids [B, T] of whole numbers, an empty row, a mask of another shape or with holes.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"input ids: expected an integer tensor [batch, tokens], got {got}")
    if ids.numel() == 0:
        raise InputError(f"input ids are empty (shape {tuple(ids.shape)}): a prompt needs at least one token per row")
    if attention_mask is None:
        return list(ids)
    if attention_mask.shape != ids.shape:
        raise InputError(f"attention mask {tuple(attention_mask.shape)} does not match input ids {tuple(ids.shape)}")
    rows = []
    for index, (row, mask) in enumerate(zip(ids, attention_mask.to(ids.device).bool())):
        changes = int((mask[1:] != mask[:-1]).sum())
        if changes > (1 if bool(mask[0]) or bool(mask[-1]) else 0):
            raise InputError(f"attention mask of row {index} has holes: padding must be on the left or on the right")
        if not bool(mask.any()):
            raise InputError(f"attention mask of row {index} is all zero: the row has no tokens")
        rows.append(row[mask])
    return rows


def padding_mask(ids: Tensor, pad: int | None, eos: int | list[int] | None, *, right: bool) -> Tensor:
    """The mask int64 [B, T] of ids [B, T] that came without one: 0 at padding on the left, and on the right where `right` says so.

    As in transformers, the padding token counts as padding where it is not an end of text; but not between other tokens, where only a
    model can have put it.
    """
    mask = torch.ones_like(ids)
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    if pad is None or pad in ends:
        return mask
    real = (ids != pad).to(ids.dtype)
    inside = real.cumsum(1).clamp(max=1)
    if right:
        inside = inside * real.flip(1).cumsum(1).clamp(max=1).flip(1)
    return torch.where(real.any(1, keepdim=True), inside, mask)


def check_vocabulary(rows: list[Tensor], vocab_size: int) -> None:
    """Raise `InputError` for ids outside of the vocabulary."""
    low, high = min(int(row.min()) for row in rows), max(int(row.max()) for row in rows)
    if low < 0 or high >= vocab_size:
        raise InputError(f"input ids reach from {low} to {high}; this model's vocabulary is 0 to {vocab_size - 1}")


def check_positions(positions: Tensor | None, ids: Tensor, mask: Tensor | None, first: list[int]) -> None:
    """Raise `InputError` where positions [B, T] of ids [B, T] are not those that a memory counts, from `first` of each row on."""
    if positions is None:
        return
    if positions.dim() != 2 or positions.shape[1] != ids.shape[1] or positions.shape[0] not in (1, len(ids)):
        raise InputError(f"position ids {tuple(positions.shape)} do not match input ids {tuple(ids.shape)}")
    real = torch.ones_like(ids) if mask is None else mask.to(ids)
    begin = torch.tensor(first, dtype=torch.int64, device=ids.device)[:, None]
    counted, given = begin + real.cumsum(1) - 1, positions.to(ids).expand_as(ids)
    wrong = (given != counted) & real.bool()
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise InputError(
            f"position ids: row {row} has {int(given[row, column])} in column {column}, where its memory counts "
            f"{int(counted[row, column])}: a row's own tokens are counted from 0, without padding and without gaps; leave them out"
        )


def in_columns(parts: list[Tensor], mask: Tensor) -> Tensor:
    """What parts [n, ...] say of each row's tokens, in the columns [B, T] where the tokens stand; zero at padding."""
    out = parts[0].new_zeros((*mask.shape, *parts[0].shape[1:]))
    for row, (part, real) in enumerate(zip(parts, mask.to(out.device).bool())):
        out[row, real] = part
    return out


__all__ = ["check_positions", "check_vocabulary", "in_columns", "padding_mask", "real_tokens"]
