"""What a prefill leaves behind: the full KV in the host tier, and what methods need to compress it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semkv.ir.program import Program

OBSERVED_QUERIES = 64
"""Queries of the prompt's end that a record keeps, for observation windows."""


@dataclass
class RowRecord:
    """One row after prefill.

    Attributes
    ----------
    ids: int64 [n].
    keys, values: per KV store [Hkv, n, D] and [Hkv, n, Dv] in the KV dtype, in the host tier.
    queries: per site, the last min(n, 64) queries [Hq, w, D] in the compute dtype; all n where `all_queries`, on the host.
    surprisal: float32 [n] in nats, the first token's being 0; None where it was not asked for.
    logits: [vocab] after the last token.
    features: hidden states [n, H] that entered the layers of the sites that a retrieval head reads, on the host.
    head_orders: per KV store the user's model's KV head at each place, where the program that made it moved heads.
    known: what components have computed of the record, by name, so that other budgets find it there.
    """

    ids: Tensor
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)
    surprisal: Tensor | None = None
    logits: Tensor | None = None
    all_queries: bool = False
    head_orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    features: dict[int, Tensor] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def ordered_for(self, program: Program) -> RowRecord:
        """This record with the heads of every store in the order that `program` has them; itself where they are."""
        orders = head_orders(program)
        if orders == self.head_orders:
            return self
        keys, values, queries = dict(self.keys), dict(self.values), dict(self.queries)
        for site in program.sites:
            plain = tuple(range(site.kv_heads))
            have = self.head_orders.get(site.store, plain)
            place = [have.index(head) for head in orders.get(site.store, plain)]
            queries[site.index] = queries[site.index].unflatten(0, (site.kv_heads, -1))[place].flatten(0, 1)
            if self.keys[site.store] is keys[site.store]:
                keys[site.store], values[site.store] = keys[site.store][place], values[site.store][place]
        return replace(self, keys=keys, values=values, queries=queries, head_orders=orders, known={})


def head_orders(program: Program) -> dict[int, tuple[int, ...]]:
    """Per KV store whose heads a pass moved: the user's model's KV head at each place."""
    return {site.store: site.head_order for site in program.stores if site.head_order}


class Recorder:
    """The memory of a prefill program: moves each site's keys and values to the host as they are made."""

    def __init__(self, program: Program, record: RowRecord, dtype: torch.dtype) -> None:
        self.record_ = record
        self.dtype = dtype
        self.sites = program.sites
        self.owners = {store.index for store in program.stores}

    def record(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Keep one site's row 0; see `semkv.ir.memory.Memory.record`."""
        kept = q[0].cpu() if self.record_.all_queries else q[0, :, -OBSERVED_QUERIES:]
        self.record_.queries[site] = kept.clone()
        if site in self.owners:
            store = self.sites[site].store
            self.record_.keys[store] = k[0].to("cpu", self.dtype, copy=True).contiguous()
            self.record_.values[store] = v[0].to("cpu", self.dtype, copy=True).contiguous()

    def observe(self, site: int, hidden: Tensor) -> None:
        """Keep the hidden states of row 0; see `semkv.ir.memory.Observer.observe`."""
        self.record_.features[site] = hidden[0].to("cpu", copy=True)

    def entries(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor):  # pragma: no cover - protocol
        raise RuntimeError("a recorder serves prefill programs only; extend and decode need a state")


SURPRISAL_CHUNK = 256


@torch.no_grad()
def chunked_surprisal(head: torch.nn.Module, hidden: Tensor, ids: Tensor, chunk: int = SURPRISAL_CHUNK) -> Tensor:
    """-log p of each token given the tokens before it (SeKV Eq. 1), without [tokens, vocab] logits.

    hidden [n, H], ids int64 [n] -> float32 [n]; the first token, which nothing predicts, gets 0.
    """
    out = torch.zeros(len(ids), dtype=torch.float32)
    for start in range(0, len(ids) - 1, chunk):
        end = min(start + chunk, len(ids) - 1)
        logits = head(hidden[None, start:end])[0].float()
        target = ids[start + 1 : end + 1]
        out[start + 1 : end + 1] = (torch.logsumexp(logits, -1) - logits.gather(-1, target[:, None])[:, 0]).cpu()
    return out
