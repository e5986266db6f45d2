"""Join the entries of a site's parts, each with KV heads of its own, and of the rows of a batch, into one call of the operator.

Entries stay where and as they are: blocks say which row and heads they are of. Only factored spans are padded, to the largest of
them; padding has bias -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite

NEG_INF = float("-inf")
BLOCKS = ("block_k", "block_v", "block_positions", "block_bias", "block_k_scale", "block_v_scale")
"""What a block has, None in place of a whole list where no block has it."""
FACTORS = ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v")
FACTORED = (*FACTORS, "factored_positions", "factored_bias")


def join_parts(parts: list[Entries], sites: list[AttentionSite], tokens: int) -> Entries:
    """Entries without a batch dimension, of the heads of each of `sites` -> those of all heads, for `tokens` queries."""
    if len(parts) == 1:
        return parts[0]
    return _joined(parts, [site.first_head for site in sites], sites, tokens, torch.cat)


def stack_rows(rows: list[Entries], site: AttentionSite, tokens: int) -> Entries:
    """Entries of whole rows, without a batch dimension -> those of the batch, for `tokens` queries each."""
    if len(rows) == 1:
        row = _with_batch(rows[0])
        return row._replace(**{name: x[None] for name in FACTORED if (x := getattr(row, name)) is not None})
    firsts = [row * site.kv_heads for row in range(len(rows))]
    made = _joined(rows, firsts, [site] * len(rows), tokens, torch.stack)
    return _with_batch(made)


def _with_batch(row: Entries) -> Entries:
    """The blocks with a batch dimension of 1."""
    given = {name: own for name in BLOCKS if (own := getattr(row, name)) is not None}
    batched: dict[str, Any] = {name: [None if x is None else x[None] for x in own] for name, own in given.items()}
    return row._replace(**batched)


def _joined(
    parts: list[Entries],
    firsts: list[int],
    sites: list[AttentionSite],
    tokens: int,
    join: Callable[[list[Tensor]], Tensor],
) -> Entries:
    """Blocks one behind the other, each part's from its first place on, and factored spans put together by `join`."""
    joined: dict[str, Any] = {}
    for name in BLOCKS:
        column = [x for part in parts for x in getattr(part, name) or [None] * len(part.block_k)]
        if any(x is not None for x in column):
            joined[name] = column
    heads = [
        first + place for part, first in zip(parts, firsts) for place in part.block_heads or [0] * len(part.block_k)
    ]
    if any(part.key_u is not None for part in parts):
        joined |= {name: join(columns) for name, columns in _padded_factors(parts, sites, tokens).items()}
    return Entries(**joined, block_heads=heads)


def _padded_factors(parts: list[Entries], sites: list[AttentionSite], tokens: int) -> dict[str, list[Tensor]]:
    """By name, the factored spans of each part, those of parts that have none included, all of one size but for their heads."""
    like = next(part for part in parts if part.key_u is not None)
    out: dict[str, list[Tensor]] = {name: [] for name in FACTORED}
    for part, site in zip(parts, sites):
        given = part if part.key_u is not None else _no_factors(like, site.kv_heads)
        shape = given.factored_positions.shape[1:]
        out["factored_positions"].append(given.factored_positions.expand(site.kv_heads, *shape))
        out["factored_bias"].append(given.factored_bias.expand(site.q_heads, tokens, *shape))
        for name in FACTORS:
            out[name].append(getattr(given, name))
    return {name: _same_size(columns, NEG_INF if name == "factored_bias" else 0.0) for name, columns in out.items()}


def _no_factors(like: Entries, heads: int) -> Entries:
    """A part of `heads` heads without a factored span."""
    empty = {
        name: getattr(like, name)[:1, :0].expand(heads, *[-1] * (getattr(like, name).dim() - 1)) for name in FACTORS
    }
    return like._replace(
        **empty, factored_positions=like.factored_positions[:1, :0], factored_bias=like.factored_bias[:1, :1, :0]
    )


def _same_size(parts: list[Tensor], fill: float) -> list[Tensor]:
    """Every dimension but the first padded to its largest."""
    sizes = [max(part.shape[dim] for part in parts) for dim in range(1, parts[0].dim())]
    padded = []
    for part in parts:
        widths = [width for have, want in zip(reversed(part.shape[1:]), reversed(sizes)) for width in (0, want - have)]
        padded.append(pad(part, widths, value=fill))
    return padded
