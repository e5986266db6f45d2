"""Join the entries of a site's parts, each with KV heads of its own, and of the rows of a batch, into one call of the operator.

Exact entries stay where they are: blocks say which row and heads they are of. A coarse entry is a block's as well, its log size
in the bias. Only factored spans are padded, to the largest of them; padding has bias -inf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite

NEG_INF = float("-inf")
FACTORS = ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v")


def join_parts(parts: list[Entries], sites: list[AttentionSite], tokens: int) -> Entries:
    """Entries without a batch dimension, of the heads of each of `sites` -> those of all heads, for `tokens` queries."""
    if len(parts) == 1:
        return parts[0]
    return _joined(parts, [site.first_head for site in sites], sites, tokens, torch.cat)


def stack_rows(rows: list[Entries], site: AttentionSite, tokens: int) -> Entries:
    """Entries of whole rows, without a batch dimension -> those of the batch, for `tokens` queries each."""
    if len(rows) == 1:
        row = _with_batch(rows[0])
        return Entries(*row[:5], *(None if x is None else x[None] for x in row[5:]))
    firsts = [row * site.kv_heads for row in range(len(rows))]
    made = _joined(rows, firsts, [site] * len(rows), tokens, torch.stack)
    return _with_batch(made)


def _with_batch(row: Entries) -> Entries:
    """The exact blocks with a batch dimension of 1."""
    bias = None if row.exact_bias is None else [None if x is None else x[None] for x in row.exact_bias]
    return row._replace(
        exact_k=[x[None] for x in row.exact_k], exact_v=[x[None] for x in row.exact_v],
        exact_positions=[x[None] for x in row.exact_positions], exact_bias=bias,
    )  # fmt: skip


def _joined(
    parts: list[Entries], firsts: list[int], sites: list[AttentionSite], tokens: int, join: Callable[[list[Tensor]], Tensor]
) -> Entries:  # fmt: skip
    """Blocks one behind the other, each part's from its first place on, and factored spans put together by `join`."""
    blocks = [block for part, first in zip(parts, firsts) for block in _blocks(part, first)]
    k, v, positions, bias, heads = (list(column) for column in zip(*blocks))
    factors: dict[str, Tensor] = {}
    if any(part.key_u is not None for part in parts):
        factors = {name: join(columns) for name, columns in _padded_factors(parts, sites, tokens).items()}
    return Entries(k, v, positions, None if all(x is None for x in bias) else bias, heads, **factors)


def _blocks(part: Entries, first: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None, int]]:
    """(k, v, positions, bias, first place) of its exact blocks and its coarse entries."""
    heads = part.exact_heads or [0] * len(part.exact_k)
    biases = part.exact_bias or [None] * len(part.exact_k)
    made = [
        (k, v, positions, bias, first + head)
        for k, v, positions, bias, head in zip(part.exact_k, part.exact_v, part.exact_positions, biases, heads)
    ]
    if part.coarse_k is not None and part.coarse_v is not None and part.coarse_positions is not None:
        made.append((part.coarse_k, part.coarse_v, part.coarse_positions, part.coarse_bias, first))
    return made


def _padded_factors(parts: list[Entries], sites: list[AttentionSite], tokens: int) -> dict[str, list[Tensor]]:
    """By name, the factored spans of each part, those of parts that have none included, all of one size but for their heads."""
    like = next(part for part in parts if part.key_u is not None)
    out: dict[str, list[Tensor]] = {name: [] for name in (*FACTORS, "factored_positions", "factored_bias")}
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
