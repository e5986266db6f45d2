"""A cache in which recurrent states are tensors that are given and taken, and attention finds no past."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from semkv.capture.checks import accepts, text_config

ARGUMENTS = ("past_key_values", "cache")
"""Names under which models take a cache."""


class Key(NamedTuple):
    """One state: its layer, its kind, and its number among those of that kind."""

    layer: int
    kind: str
    number: int


def cache_argument(model: nn.Module) -> str | None:
    """The name under which the model takes a cache; None where it takes none."""
    return next((name for name in ARGUMENTS if accepts(model, name)), None)


def keeps_states(model: nn.Module) -> bool:
    """Whether the cache that transformers makes for the model has layers that are no keys and values."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in _layers(model))


def keeps_index_keys(model: nn.Module) -> bool:
    """Whether that cache has layers that hold keys of an index besides."""
    return any(hasattr(layer, "update_indexer") for layer in _layers(model))


def _layers(model: nn.Module) -> list[Any]:
    config = text_config(model)
    if config is None or cache_argument(model) is None:
        return []
    try:
        return DynamicCache(config=config).layers
    except Exception:  # a configuration that transformers has no cache for, whatever it raises there
        return []


class StateCache(DynamicCache):
    """What a model sees as its cache while it is watched and traced.

    given: the states before; none where nothing came before. `current`: those after, by key, in the order of their first use.
    `attended`: whether attention stored keys and values. touched: is called with each key that is read or written. indexing: is given the
    new keys of an index and returns those of all tokens; None: there are no others.
    """

    def __init__(
        self,
        config: Any,
        given: Mapping[Key, Tensor] | None,
        touched: Callable[[Key], None] | None = None,
        indexing: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        DynamicCache.__init__(self, config=config)  # not that of a model's own class
        self.model_config, self.given = config, given
        self.current: dict[Key, Tensor] = {}
        self.attended = False
        self._touched, self._indexing = touched, indexing

    # -- attention: no past, and nothing is kept -----------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.attended = True
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return indexer_key_states if self._indexing is None else self._indexing(indexer_key_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    # -- recurrent states ----------------------------------------------------------------------------------------------

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.given is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._read(Key(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._read(Key(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        key = Key(layer_idx, "conv", state_idx)
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        past = self._read(key)
        if past is None:
            missing = max(0, size - conv_states.shape[-1])
            full = torch.nn.functional.pad(conv_states, (missing, 0))
        else:
            full = torch.cat([past, conv_states], -1)
        self.current[key] = full[..., -size:]
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        key = Key(layer_idx, "recurrent", state_idx)
        self._touch(key)
        self.current[key] = recurrent_states
        return recurrent_states

    def _read(self, key: Key) -> Tensor | None:
        """The state; a copy of what was given, as models write in place."""
        self._touch(key)
        if key not in self.current and self.given is not None and key in self.given:
            self.current[key] = self.given[key].clone()
        return self.current.get(key)

    def _touch(self, key: Key) -> None:
        if self._touched is not None:
            self._touched(key)


def cache_kind(own: type) -> type[StateCache]:
    """`StateCache` for models that insist on a cache of the class `own`: pairs of methods `get_NAME(layer)` and `set_NAME(layer, state)`
    that only this class has are states as well."""
    if not issubclass(own, DynamicCache) or own is DynamicCache:
        return StateCache
    added = {name for one in own.__mro__ if one not in DynamicCache.__mro__ for name in vars(one)}
    namespace: dict[str, Any] = {}
    for name in sorted(name.removeprefix("get_") for name in added if name.startswith("get_")):
        if f"set_{name}" in added:
            namespace |= {f"get_{name}": _getter(name), f"set_{name}": _setter(name)}
    return type(StateCache.__name__, (StateCache, own), namespace)


def _getter(name: str) -> Callable[[StateCache, int], Tensor | None]:
    return lambda self, layer_idx: self._read(Key(layer_idx, name, 0))


def _setter(name: str) -> Callable[[StateCache, int, Tensor], None]:
    def replace(self: StateCache, layer_idx: int, state: Tensor) -> None:
        key = Key(layer_idx, name, 0)
        self._touch(key)
        self.current[key] = state

    return replace


__all__ = ["Key", "StateCache", "cache_argument", "cache_kind", "keeps_index_keys", "keeps_states"]
