"""Multi-head latent attention on what its heads are made of: one latent per token, whatever the number of heads.

DeepSeek-V2 (Sec. 2.1) makes the keys and values of all heads from one latent c [r] per token, and rotates a part of the key that
all heads share: k_h = [W_h c, k_shared], v_h = U_h c. As q.(W c) = (W^T q).c and the sum of weighted values is U applied to the
weighted sum of latents, attention may read the latents themselves, in which all query heads share one KV head with keys
[c, k_shared] and values c. What a memory then keeps, chooses and moves are latents, and none of them is projected up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from semkv.ir.graph import attention_nodes, copy_graph_module, finish, shape_of
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import emit
from semkv.passes.head_columns import Columns, columns_of

aten = torch.ops.aten


class AbsorbLatents(Pass):
    """A site whose heads are projections of one latent per token reads the latents: one KV head in place of all.

    Only where that is smaller, and only where nobody else needs the heads: other sites stay as they are. The projections are
    applied to queries and to results instead, by views of the same weights.
    """

    name = "absorb_latents"
    needs = "found"
    leaves = "found"
    after = ("find_attention", "lift_positions")

    def run(self, program: Program, options: PassOptions) -> Program:
        """Rewrite every site that can be; the note says how many, and what a token takes before and after."""
        body = copy_graph_module(program.body)
        nodes = dict(zip((site.index for site in program.sites), attention_nodes(body.graph)))
        readers = Counter(site.store for site in program.sites)
        sites = []
        for site in program.sites:
            latent = latent_of(nodes[site.index], site) if readers[site.store] == 1 else None
            sites.append(site if latent is None else _absorb(body, nodes[site.index], site, latent))
        changed = [(old, new) for old, new in zip(program.sites, sites) if old is not new]
        before, after = (sum(pair[which].values_per_token for pair in changed) for which in (0, 1))
        note = f"{self.name}: {len(changed)} of {len(sites)} sites read latents"
        if changed:
            note += f": {after // len(changed):,} numbers per token and layer in place of {before // len(changed):,}"
        return program.evolve(note, body=finish(body), sites=tuple(sites))


@dataclass(frozen=True)
class Latent:
    """Of one site: `source` [B, T, r] or [B, 1, T, r], and what keys and values are made of (`Columns`)."""

    source: Node
    keys: tuple[Columns, ...]
    values: tuple[Columns, ...]

    @property
    def rank(self) -> int:
        """r."""
        return int((shape_of(self.source) or (0,))[-1])


def latent_of(attention: Node, site: AttentionSite) -> Latent | None:
    """What the keys and values of a site are made of, where they are those of a latent that is smaller than they are."""
    keys, values = (tuple(columns_of(operand)) for operand in attention.args[1:3])
    projections = [part.source for part in (*keys, *values) if not part.shared]
    if site.kv_heads == 1 or any(part.shared for part in values) or any(source is None for source in projections):
        return None
    sources = {source.args[0] for source in projections if source is not None}
    if len(sources) != 1 or all(part.shared for part in keys):
        return None
    (source,) = sources
    shape = shape_of(source) or ()
    one_per_token = len(shape) == 3 or (len(shape) == 4 and shape[1] == 1)
    latent = Latent(source, keys, values)
    if not one_per_token or 2 * latent.rank + _width(keys, shared=True) >= site.values_per_token:
        return None
    return latent


def _width(parts: tuple[Columns, ...], *, shared: bool) -> int:
    return sum(part.width for part in parts if part.shared == shared)


def _absorb(body: GraphModule, node: Node, site: AttentionSite, latent: Latent) -> AttentionSite:
    """Let the attention `node` read the latent; the site that it is then."""

    def make(target: Callable[..., Any], *args: Any) -> Node:
        return emit(body.graph, target, args, like=node, by=AbsorbLatents.name)

    def projection(part: Columns) -> Node:
        """W [Hq, width, r] of `part`: the rows of every head's block, for each of the query heads that read it."""
        assert part.source is not None
        whole = make(aten.reshape.default, part.source.args[1], [site.kv_heads, part.block, latent.rank])
        rows = make(aten.slice.Tensor, whole, 1, part.first, part.last)
        if site.group_size == 1:
            return rows
        each = make(aten.expand.default, make(aten.unsqueeze.default, rows, 1), [-1, site.group_size, -1, -1])
        return make(aten.reshape.default, each, [site.q_heads, part.width, latent.rank])

    with body.graph.inserting_before(node):
        q, shape = node.args[0], shape_of(latent.source) or ()
        tokens = latent.source if len(shape) == 4 else make(aten.unsqueeze.default, latent.source, 1)
        asked, keys, place = None, [tokens], 0
        shared = []
        for part in latent.keys:
            columns = make(aten.slice.Tensor, q, 3, place, place + part.width)
            place += part.width
            if part.shared:
                assert part.source is not None
                shared.append(columns)
                keys.append(make(aten.slice.Tensor, part.source, 3, part.first, part.last))
                continue
            product = make(aten.matmul.default, columns, projection(part))
            asked = product if asked is None else make(aten.add.Tensor, asked, product)
        q = make(aten.cat.default, [asked, *shared], 3)
        k = make(aten.cat.default, keys, 3)
    for number, operand in enumerate((q, k, tokens)):
        node.update_arg(number, operand)
    node.meta["val"] = _widened(node.meta["val"], latent.rank)
    with body.graph.inserting_before(node.next):
        found = [
            make(aten.matmul.default, node, make(aten.transpose.int, projection(part), 1, 2)) for part in latent.values
        ]
        result = found[0] if len(found) == 1 else make(aten.cat.default, found, 3)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in found)
    return replace(site, kv_heads=1, key_dim=latent.rank + _width(latent.keys, shared=True), value_dim=latent.rank)


def _widened(value: torch.Tensor, width: int) -> torch.Tensor:
    """The fake value of an attention's result with `width` numbers per head."""
    return value.new_empty([*value.shape[:3], width])


__all__ = ["AbsorbLatents", "Latent", "latent_of"]
