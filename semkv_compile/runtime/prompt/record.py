"""What a prefill leaves behind: the full KV in the host tier, and what methods need to compress it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semkv.ir.program import KEY_MEAN, KEY_SCALE, Program
from semkv.profiles.schema.codes import KeyBalance
from semkv.runtime.weights import Weights

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
    logits: [vocab] after the last token. last_logits: [n, vocab] after as many of the last tokens as were asked for.
    features: hidden states [n, H] that entered the layers of the sites that a retrieval head reads, on the host.
    recurrent: of each recurrent site its states [1, ...] after the last token, on the model's device.
    head_orders: per KV store the user's model's KV head at each place, where the program that made it moved heads. balances: of its
        keys, where that program balanced them.
    known: what components have computed of the record, by name, so that other budgets find it there.
    model: fingerprint of the model that read the prompt; None where nobody says. weights: those it had, where it may change.
    turned: by how much the rotary positions of what follows lie above its places; see `semkv.runtime.prompt.content`.
    going_on: it is no prompt but a row in the middle of its text, which its method takes over: what is newest counts as much as the
        rest of it.
    """

    ids: Tensor
    keys: MutableMapping[int, Tensor] = field(default_factory=dict)
    values: MutableMapping[int, Tensor] = field(default_factory=dict)
    queries: MutableMapping[int, Tensor] = field(default_factory=dict)
    surprisal: Tensor | None = None
    logits: Tensor | None = None
    last_logits: Tensor | None = None
    all_queries: bool = False
    head_orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    balances: dict[int, KeyBalance] = field(default_factory=dict)
    features: dict[int, Tensor] = field(default_factory=dict)
    recurrent: dict[int, list[Tensor]] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)
    model: str | None = None
    weights: Weights | None = None
    turned: int = 0
    going_on: bool = False

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def release(self, store: int) -> None:
        """Let go of the keys and values of one store, here and wherever else they were in this order or another."""
        self.keys.pop(store)
        self.values.pop(store)

    def ordered_for(self, program: Program) -> RowRecord:
        """This record as `program` would have made it: the heads of every store in its order, keys and queries in its balance; itself
        where they are."""
        orders, balances = head_orders(program), key_balances(program)
        if orders == self.head_orders and _equal(balances, self.balances):
            return self
        places: dict[int, list[int]] = {}
        maps: dict[int, tuple[Tensor, Tensor]] = {}
        queries = dict(self.queries)
        for site in program.sites:
            store, plain = site.store, tuple(range(site.kv_heads))
            have = self.head_orders.get(store, plain)
            place = [have.index(head) for head in orders.get(store, plain)]
            grouped = queries[site.index].unflatten(0, (site.kv_heads, -1))
            if place != list(plain):
                places[store], grouped = place, grouped[place]
            if store in balances or store in self.balances:
                shape = site.kv_heads, site.key_dim
                old, new = self._balance(store, shape).heads(place), balances.get(store) or _neutral(shape)
                maps[store] = new.scale / old.scale, (old.mean - new.mean) * new.scale
                back = (old.scale / new.scale)[:, None, None]
                grouped = grouped * back.to(grouped)
            queries[site.index] = grouped.flatten(0, 1)
        keys, values = _Changed(self.keys, places, maps), _Changed(self.values, places, {})
        return replace(self, keys=keys, values=values, queries=queries, head_orders=orders, balances=balances, known={})

    def on(self, device: torch.device) -> RowRecord:
        """This record with keys, values and queries on `device`, those of one layer at a time; itself where that is the host's."""
        if device.type == "cpu":
            return self
        keys, values, queries = (_There(x, device) for x in (self.keys, self.values, self.queries))
        return replace(self, keys=keys, values=values, queries=queries)

    def _balance(self, store: int, shape: tuple[int, int]) -> KeyBalance:
        return self.balances.get(store) or _neutral(shape)


class _Copies(MutableMapping[int, Tensor]):
    """What is made of the stores of a record. Only the last one that was read is held in memory."""

    def __init__(self, stores: MutableMapping[int, Tensor]) -> None:
        self._stores = stores
        self._last: tuple[int, Tensor] | None = None

    def __getitem__(self, store: int) -> Tensor:
        if self._last is None or self._last[0] != store:
            self._last = None  # freed before the next is copied
            self._last = (store, self._made(store))
        return self._last[1]

    @abstractmethod
    def _made(self, store: int) -> Tensor: ...

    def __setitem__(self, store: int, x: Tensor) -> None:
        raise TypeError(f"store {store} of a changed record cannot be replaced: change the record that it was made of")

    def __delitem__(self, store: int) -> None:
        self._last = None
        del self._stores[store]

    def __iter__(self) -> Iterator[int]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)


class _There(_Copies):
    """The same on a device."""

    def __init__(self, stores: MutableMapping[int, Tensor], device: torch.device) -> None:
        super().__init__(stores)
        self._device = device

    def _made(self, store: int) -> Tensor:
        return self._stores[store].to(self._device)


class _Changed(_Copies):
    """Stores with heads in other places, times and plus a number per head and channel."""

    def __init__(
        self,
        stores: MutableMapping[int, Tensor],
        places: Mapping[int, list[int]],
        maps: Mapping[int, tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(stores)
        self._places, self._maps = places, maps

    def __getitem__(self, store: int) -> Tensor:
        if store not in self._places and store not in self._maps:
            return self._stores[store]
        return super().__getitem__(store)

    def _made(self, store: int) -> Tensor:
        x = self._stores[store]
        if store in self._places:
            x = x[self._places[store]]
        if store in self._maps:
            times, plus = self._maps[store]
            x = (x.float() * times[:, None] + plus[:, None]).to(x.dtype)
        return x


def head_orders(program: Program) -> dict[int, tuple[int, ...]]:
    """Per KV store whose heads a pass moved: the user's model's KV head at each place."""
    return {site.store: site.head_order for site in program.stores if site.head_order}


def key_balances(program: Program) -> dict[int, KeyBalance]:
    """Per KV store whose keys a pass balanced: how, its heads in the order of the program."""
    found = {}
    for site in program.stores:
        mean, scale = (getattr(program.prefill, name.format(site.store), None) for name in (KEY_MEAN, KEY_SCALE))
        if mean is not None or scale is not None:
            neutral = _neutral((site.kv_heads, site.key_dim))
            given = (neutral.mean if mean is None else mean, neutral.scale if scale is None else scale)
            found[site.store] = KeyBalance(*(x.reshape(neutral.mean.shape).float().cpu() for x in given))
    return found


def _neutral(shape: tuple[int, int]) -> KeyBalance:
    mean = torch.zeros(shape, dtype=torch.float32, device="cpu")
    return KeyBalance(mean, torch.ones_like(mean))


def _equal(one: Mapping[int, KeyBalance], other: Mapping[int, KeyBalance]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(x.mean, other[store].mean) and torch.equal(x.scale, other[store].scale) for store, x in one.items()
    )


SURPRISAL_CHUNK = 256


@torch.no_grad()
def chunked_surprisal(head: torch.nn.Module, hidden: Tensor, ids: Tensor, chunk: int = SURPRISAL_CHUNK) -> Tensor:
    """-log p of each token given the tokens before it (SeKV Eq. 1), without [tokens, vocab] logits.

    hidden [n, H], ids int64 [n] -> float32 [n]; the first token, which nothing predicts, gets 0.
    """
    return torch.nn.functional.pad(next_surprisal(head, hidden[:-1], ids[1:], chunk), (1, 0))


@torch.no_grad()
def next_surprisal(head: torch.nn.Module, hidden: Tensor, targets: Tensor, chunk: int = SURPRISAL_CHUNK) -> Tensor:
    """-log p of each of the tokens `targets` int64 [n] given the hidden state before it, hidden [n, H] -> float32 [n] on the
    host; 0 where a target is negative, which is no id."""
    out = torch.zeros(len(targets), dtype=torch.float32, device=hidden.device)  # the host would wait for every chunk
    for start in range(0, len(targets), chunk):
        logits = head(hidden[None, start : start + chunk])[0].float()
        target = targets[start : start + chunk]
        nats = torch.logsumexp(logits, -1) - logits.gather(-1, target.clamp(min=0)[:, None])[:, 0]
        out[start : start + chunk] = torch.where(target < 0, 0, nats)
    return out.cpu()


def copied(recurrent: Mapping[int, Sequence[Tensor]]) -> dict[int, list[Tensor]]:
    """States of recurrent sites that are written in place from now on."""
    return {
        site: [x.clone(memory_format=torch.contiguous_format) for x in states] for site, states in recurrent.items()
    }
