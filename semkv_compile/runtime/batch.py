"""Join the entries of several rows, each of its own size, into one call of the operator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.ir.memory import Entries

NEG_INF = float("-inf")


def stack_entries(rows: list[Entries], q_heads: int, tokens: int) -> Entries:
    """Pad each row's entries (without a batch dimension) to the largest and stack them; padding has bias -inf."""
    if len(rows) == 1:
        return Entries(*(None if x is None else x[None] for x in rows[0]))
    exact_bias = [_bias(row.exact_bias, row.exact_k.shape[1], q_heads, tokens, row.exact_k) for row in rows]
    same = len({row.exact_k.shape[1] for row in rows}) == 1 and all(row.exact_bias is None for row in rows)
    out: dict[str, Tensor | None] = {
        "exact_k": _stack([row.exact_k for row in rows], 1),
        "exact_v": _stack([row.exact_v for row in rows], 1),
        "exact_positions": _stack_heads([row.exact_positions for row in rows]),
        "exact_bias": None if same else _stack(exact_bias, -1, NEG_INF),
    }
    if any(row.coarse_k is not None for row in rows):
        blank = next(row for row in rows if row.coarse_k is not None)
        filled = [row if row.coarse_k is not None else _no_coarse(blank) for row in rows]
        out |= {name: _stack([getattr(row, name) for row in filled], 1) for name in ("coarse_k", "coarse_v")}
        out["coarse_positions"] = _stack_heads([row.coarse_positions for row in filled])
        out["coarse_bias"] = _stack(
            [_bias(r.coarse_bias, r.coarse_k.shape[1], q_heads, tokens, r.coarse_k) for r in filled], -1, NEG_INF
        )
    if any(row.key_u is not None for row in rows):
        blank = next(row for row in rows if row.key_u is not None)
        filled = [row if row.key_u is not None else _no_factors(blank) for row in rows]
        names = ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v", "factored_positions")
        out |= {name: _stack_all([getattr(row, name) for row in filled]) for name in names}
        out["factored_bias"] = _stack_all([row.factored_bias for row in filled], NEG_INF)
    return Entries(**out)


def _bias(bias: Tensor | None, count: int, q_heads: int, tokens: int, like: Tensor) -> Tensor:
    return torch.zeros(1, 1, count, device=like.device).expand(q_heads, tokens, -1) if bias is None else bias


def _stack(parts: list[Tensor], dim: int, fill: float = 0.0) -> Tensor:
    longest = max(part.shape[dim] for part in parts)
    padded = []
    for part in parts:
        widths = [0, 0] * part.dim()
        widths[2 * (part.dim() - 1 - dim % part.dim()) + 1] = longest - part.shape[dim]
        padded.append(pad(part, widths, value=fill))
    return torch.stack(padded)


def _stack_heads(parts: list[Tensor]) -> Tensor:
    heads = max(part.shape[0] for part in parts)
    return _stack([part.expand(heads, -1) for part in parts], 1)


def _stack_all(parts: list[Tensor], fill: float = 0.0) -> Tensor:
    """Pad every dimension to its largest."""
    sizes = [max(part.shape[dim] for part in parts) for dim in range(parts[0].dim())]
    padded = []
    for part in parts:
        widths = [width for dim in reversed(range(part.dim())) for width in (0, sizes[dim] - part.shape[dim])]
        padded.append(pad(part, widths, value=fill))
    return torch.stack(padded)


def _no_coarse(like: Entries) -> Entries:
    return like._replace(
        coarse_k=like.coarse_k[:, :0], coarse_v=like.coarse_v[:, :0], coarse_positions=like.coarse_positions[:, :0],
        coarse_bias=like.coarse_bias[..., :0],
    )  # fmt: skip


def _no_factors(like: Entries) -> Entries:
    names = ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v", "factored_positions")
    return like._replace(
        **{name: getattr(like, name)[:, :0] for name in names}, factored_bias=like.factored_bias[:, :, :0]
    )
