"""Attention weights by which methods judge tokens, over an observation window or over a whole prompt, and their pooling.

Weights are those of the site's softmax with its scale and soft-cap. The terms that a site has beside them, sinks
(`site.has_sinks`) and additive biases (`site.has_bias`), are not known here and left out: sinks weigh queries and heads
against each other differently, a bias that falls with distance makes far tokens look more attended than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.prompt.record import RowRecord

CHUNK_SCORES, DEVICE_SCORES = 1 << 22, 1 << 27
"""Scores held at once by `attention_received` on a CPU and on another device, where few at once are many launches: 16 and 512 MiB in
float32."""

AT_ONCE = 8
"""Queries whose weights `observed_mass` holds at once."""

Pool = Literal["max", "mean"]


def softmax_weights(site: AttentionSite, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """float32 weights [Hkv, G, T, n] of queries q [Hq, T, D] on keys k [Hkv, n, D]; hidden bool, broadcast to [Hkv, G, T, n],
    says what a query does not see."""
    return attention_logits(site, q, k).masked_fill_(hidden, float("-inf")).softmax(dim=-1)


def attention_logits(site: AttentionSite, q: Tensor, k: Tensor) -> Tensor:
    """float32 [Hkv, G, T, n] of queries q [Hq, T, D] on keys k [Hkv, n, D]: what the softmax is of."""
    grouped = q.float().unflatten(0, (site.kv_heads, site.group_size))
    logits = torch.einsum("hgtd,hnd->hgtn", grouped, k.float())
    logits.mul_(site.scale)  # in place, as all else: many queries take much memory
    if site.softcap:
        logits.div_(site.softcap).tanh_().mul_(site.softcap)
    return logits


def observed_weights(site: AttentionSite, record: RowRecord, queries: int) -> Tensor:
    """Weights float32 [Hkv, G, w, n] of the prompt's last w = min(`queries`, those recorded) queries on all n tokens."""
    q, k = _of_site(site, record)
    q, n = q[:, -queries:], k.shape[1]
    seen = torch.arange(n - q.shape[1], n, dtype=torch.int64, device=k.device)[:, None]
    return softmax_weights(site, q, k, torch.arange(n, dtype=torch.int64, device=k.device) > seen)


def observed_mass(site: AttentionSite, record: RowRecord, queries: int) -> Tensor:
    """`observed_weights` summed over heads and queries, float32 [n] on the host: a KV head and a few queries at a time, as all of them
    together would take the memory of a layer."""
    mass = torch.zeros(record.tokens, dtype=torch.float32, device=record.keys[site.store].device)
    for head in range(site.first_head, site.first_head + site.kv_heads):
        own = site.part(head, head + 1, 1.0)
        q, k = _of_site(own, record)
        q, n = q[:, -queries:], k.shape[1]
        at = torch.arange(n - q.shape[1], n, dtype=torch.int64, device=k.device)
        for part, places in zip(q.split(AT_ONCE, 1), at.split(AT_ONCE)):
            hidden = torch.arange(n, dtype=torch.int64, device=k.device) > places[:, None]
            mass += softmax_weights(own, part, k, hidden).sum(dim=(0, 1, 2))
    mass = mass.cpu()
    return mass if site.among is None else site.among.sum(mass)


def attention_received(site: AttentionSite, record: RowRecord) -> Tensor:
    """Column sums float32 [Hkv, n], on the host, of the prompt's attention, averaged over the query heads of a group.

    A chunk of queries at a time, so that [heads, n, n] weights never exist. Needs a record with all queries, which keeps the
    result.
    """
    name = f"received.{site.index}.{site.first_head}.{site.kv_heads}"
    if name not in record.known:
        record.known[name] = _received(site, record).cpu()
    return record.known[name]


def _received(site: AttentionSite, record: RowRecord) -> Tensor:
    q, k = _of_site(site, record)
    n = k.shape[1]
    most = CHUNK_SCORES if k.device.type == "cpu" else DEVICE_SCORES
    chunk = max(1, most // (site.q_heads * n))
    total = torch.zeros(site.kv_heads, n, dtype=torch.float32, device=k.device)
    for start in range(0, n, chunk):
        end = min(start + chunk, n)
        seen = torch.arange(start, end, dtype=torch.int64, device=k.device)[:, None]
        hidden = torch.arange(end, dtype=torch.int64, device=k.device) > seen
        total[:, :end] += softmax_weights(site, q[:, start:end], k[:, :end], hidden).sum(dim=2).mean(dim=1)
    return total


def pooled(scores: Tensor, kernel: int, pool: Pool) -> Tensor:
    """1-D pooling over tokens [..., n] of odd width `kernel`; a mean counts the places beyond the ends as zeros."""
    flat = scores.flatten(0, -2)[:, None]
    apply = F.max_pool1d if pool == "max" else F.avg_pool1d
    return apply(flat, kernel, stride=1, padding=kernel // 2).view(scores.shape)


def mean_of_heads(site: AttentionSite, x: Tensor) -> Tensor:
    """Mean of x [Hq, ...] over all query heads of the model's site, whichever processes have them: then it is on the host."""
    if site.among is None:
        return x.mean(dim=0)
    return site.among.sum(x.sum(dim=0).cpu()) / (site.among.kv_heads * site.group_size)


def shared_votes(weights: Tensor, heads: Sequence[int] | None, kernel: int, pool: Pool = "mean") -> Tensor:
    """One score [n] for all heads of a layer (CompressKV Sec. 4.2): weights [Hq, w, n] of the observing queries on the tokens that they
    choose among, without those that stay anyway, are summed over the window, pooled, and averaged over `heads` (None: all)."""
    chosen = weights if heads is None else weights[list(heads)]
    return pooled(chosen.sum(dim=1), kernel, pool).mean(dim=0)


def _of_site(site: AttentionSite, record: RowRecord) -> tuple[Tensor, Tensor]:
    """The recorded queries [Hq, w, D] and keys [Hkv, n, D] of the heads that `site` has, where the keys are."""
    k = record.keys[site.store][site.first_head : site.first_head + site.kv_heads]
    return record.queries[site.index][site.query_heads].to(k.device), k
