"""An attention site: one place in the model where tokens look at other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from semkv.ir.ranks import Among


@dataclass(frozen=True)
class AttentionSite:
    """What `find_attention` learned about one attention, before any head is repeated.

    Attributes
    ----------
    index: place in execution order, from 0.
    name: module path of the attention in the user's model, for people.
    store: which KV store it reads; layers that share keys and values share a store.
    q_heads, kv_heads: query heads Hq and KV heads Hkv; Hq is a multiple of Hkv.
    key_dim, value_dim: D of queries and keys, Dv of values.
    scale: factor on q.k before soft-cap and bias.
    softcap: c in `c * tanh(score / c)`, 0.0 where there is none.
    window: a query at position p sees positions (p - window, p]; 0 means all of the past.
    has_sinks: a learned logit per query head joins the softmax and takes mass without a value.
    has_bias: an additive bias that depends on head and distance (`bias_slopes` or `bias_table` of the operator).
    treatment: `method` (the method decides what stays), `window` (keeps its window), `exact` (keeps all).
    reason: why it has that treatment, shown by `semkv.explain`.
    budget_share: part of the device budget that this site's store may use; the shares of a program's `method` stores
        sum to 1. 0.0 where the budget does not count the site.
    host_from: number of tokens of the sequence from which on what is folded here waits on the host, before which on the
        device; None: always on the host.
    roles: one role per KV head, from the profile's head taxonomy; empty where there is none.
    head_order: the user's model's KV head that stands at each place, where `group_heads` moved heads; empty where none
        moved. Tensors of a profile that have one row per KV head must be read in this order.
    first_head: KV head of the model's site that is the first one here, where this describes a part of a site's heads.
    chooser: the number of the recurrent site that chooses which tokens attention reads here; -1: it reads all.
    among: what the site has of the model's, where processes share it; None: all heads.
    chunk: a query at position p sees positions p - p % chunk to p, where that is not 0; `window` is the same number then.
    """

    index: int
    name: str
    store: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    has_sinks: bool = False
    has_bias: bool = False
    treatment: Literal["method", "window", "exact"] = "method"
    reason: str = ""
    budget_share: float = 0.0
    host_from: int | None = None
    roles: tuple[str, ...] = ()
    head_order: tuple[int, ...] = ()
    first_head: int = 0
    chooser: int = -1
    chunk: int = 0
    among: Among | None = None

    @property
    def once(self) -> float:
        """How much of what its heads have in common (positions) this process counts: its share of the heads; 1 where it has them all."""
        return 1 if self.among is None else len(self.among.kv) / self.among.kv_heads

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def shifts_freely(self) -> bool:
        """Whether a number that is added to all scores of a query changes none of its weights."""
        return not self.softcap and not self.has_sinks

    @property
    def values_per_token(self) -> int:
        """Numbers that one token's keys and values take over all KV heads."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def whole(self) -> AttentionSite:
        """The model's site with all of its heads, in the order of the program before processes shared them, and without roles; itself where
        none do."""
        if self.among is None:
            return self
        heads = self.among.kv_heads
        return replace(
            self,
            q_heads=heads * self.group_size,
            kv_heads=heads,
            among=None,
            head_order=self.among.order,
            roles=(),
        )

    def grouped(self, roles: Sequence[str] | None) -> AttentionSite:
        """`whole`, its heads grouped by `roles`, of the user's model's KV heads, as a program of one process has them."""
        site = self.whole
        if roles is None:
            return site
        before = site.head_order or tuple(range(site.kv_heads))
        own = [roles[head] for head in before]
        order = head_order(own)
        return replace(site, roles=tuple(own[at] for at in order), head_order=tuple(before[at] for at in order))

    @property
    def query_heads(self) -> slice:
        """The query heads of the model's site that this part of it has; all of them where it is the whole site."""
        first = self.first_head * self.group_size
        return slice(first, first + self.q_heads)

    def part(self, first: int, last: int, share: float, of: int = 0) -> AttentionSite:
        """The site of KV heads [first, last) alone, with `share` of the budget of all. of: KV heads that have positions in common with
        these, where processes share them; 0: all of the site's."""
        if (first, last) == (0, self.kv_heads) and share == 1.0 and not of:
            return self
        return replace(
            self,
            q_heads=(last - first) * self.group_size,
            kv_heads=last - first,
            first_head=first,
            budget_share=self.budget_share * share,
            roles=self.roles[first:last],
            head_order=self.head_order[first:last],
            among=replace(self.among, kv=self.among.kv[first:last], kv_heads=of) if of and self.among else self.among,
        )


def head_order(roles: Sequence[str]) -> tuple[int, ...]:
    """KV heads sorted by role, roles in the order in which they first appear, heads of a role in their own order."""
    rank = {role: number for number, role in enumerate(dict.fromkeys(roles))}
    return tuple(sorted(range(len(roles)), key=lambda head: (rank[roles[head]], head)))
