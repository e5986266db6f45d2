"""What a row that is exact still remembers of its text, so that its method can take over when the row outgrows the floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.placement import Placement
from semkv.runtime.prompt.record import OBSERVED_QUERIES, RowRecord, head_orders, key_balances
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.token_store import plain
from semkv.runtime.text import Text


@dataclass
class Past:
    """All that `RowRecord` has beside the text, keys and values, on the host, gathered as the row grows.

    placement: of the method that takes over. queries: per site the last ones in
    pieces [Hq, t, D], all of them where the method reads all. features: per site that is observed, hidden states in pieces [t, H].
    """

    placement: Placement
    queries: dict[int, list[Tensor]] = field(default_factory=dict)
    features: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, placement: Placement, record: RowRecord) -> Past:
        """Of a prompt."""
        past = cls(placement)
        for site in placement.program.sites:
            past.asked(site, record.queries[site.index])
        for place, hidden in record.features.items():
            past.observe(place, hidden)
        return past

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        pieces = (*self.queries.values(), *self.features.values())
        return sum(x.nbytes for piece in pieces for x in piece)

    def asked(self, site: AttentionSite, q: Tensor) -> None:
        """The site's next queries are q [Hq, t, D]."""
        if site.treatment != "method":
            return
        pieces = self.queries.setdefault(site.index, [])
        pieces.append(q.to("cpu", copy=True))
        if not self._all_queries and len(pieces) > OBSERVED_QUERIES:
            pieces[:] = [torch.cat(pieces, 1)[:, -OBSERVED_QUERIES:]]

    def observe(self, site: int, hidden: Tensor) -> None:
        """The next tokens entered the layer of a site as hidden [t, H]."""
        if site in self.placement.plan.features:
            self.features.setdefault(site, []).append(hidden.to("cpu", copy=True))

    def record(self, text: Text, stores: Mapping[int, tuple[SiteMemory, ...]]) -> RowRecord:
        """The row of a text, whose `stores` hold every token, as a prompt that was read just now."""
        placement = self.placement
        queries = {site: torch.cat(pieces, 1) for site, pieces in self.queries.items()}
        if not self._all_queries:
            queries = {site: q[:, -OBSERVED_QUERIES:] for site, q in queries.items()}
        return RowRecord(
            ids=text.ids,
            keys={store.store: plain(stores[store.store][0].recent.k).cpu() for store in placement.budgeted},
            values={store.store: plain(stores[store.store][0].recent.v).cpu() for store in placement.budgeted},
            queries=queries,
            surprisal=text.surprisal if placement.plan.reads_surprisal else None,
            all_queries=self._all_queries,
            head_orders=head_orders(placement.program),
            balances=key_balances(placement.program),
            features={site: torch.cat(pieces) for site, pieces in self.features.items()},
            going_on=True,
        )

    def clone(self) -> Past:
        """A copy that grows on its own; pieces are shared, which nobody writes to."""
        return Past(
            self.placement,
            {site: list(pieces) for site, pieces in self.queries.items()},
            {site: list(pieces) for site, pieces in self.features.items()},
        )

    @property
    def _all_queries(self) -> bool:
        return self.placement.plan.reads_queries

    # -- files ---------------------------------------------------------------------------------------------------------

    def to_tensors(self) -> dict[str, Tensor]:
        """From which `from_tensors` makes an equal one."""
        out = {f"queries.{site}": torch.cat(pieces, 1) for site, pieces in self.queries.items()}
        return out | {f"features.{site}": torch.cat(pieces) for site, pieces in self.features.items()}

    @classmethod
    def from_tensors(cls, placement: Placement, own: Mapping[str, Tensor], tokens: int) -> Past:
        """Of a row of `tokens` tokens; `ValueError` or `KeyError` where the tensors are not of one."""
        past = cls(placement)
        for site in placement.program.sites:
            if site.treatment == "method":
                q = own[f"queries.{site.index}"]
                least = tokens if past._all_queries else min(tokens, OBSERVED_QUERIES)
                if (
                    q.dim() != 3
                    or (q.shape[0], q.shape[2]) != (site.q_heads, site.key_dim)
                    or not least <= q.shape[1] <= tokens
                ):
                    raise ValueError(
                        f"queries of site {site.index} are {tuple(q.shape)}, expected those of {tokens} tokens"
                    )
                past.asked(site, q)
        for place in placement.plan.features:
            hidden = own[f"features.{place}"]
            if hidden.dim() != 2 or len(hidden) != tokens:
                raise ValueError(f"hidden states of site {place} are {tuple(hidden.shape)}, expected {tokens} rows")
            past.observe(place, hidden)
        return past
