"""One prefill of a context for all presses; runs in the environment of kvpress.

A press acts after each layer's attention and changes nothing that the prefill computes, so that its attention need not be
computed once more for every press and budget: what the attention modules were given and gave is recorded once, and played
back through the same modules with the press's own hooks on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


class Call(NamedTuple):
    """One call of an attention module: its arguments without the cache, its output, and the keys and values it cached."""

    arguments: dict[str, Any]
    output: tuple[Any, ...]
    keys: Tensor
    values: Tensor


class Prefill:
    """A context's prefill without a press; `compress` is the cache that a press makes of it. logits [vocab]: after the context."""

    def __init__(self, model: PreTrainedModel, ids: Tensor):
        self.model, self.ids = model, ids
        self.layers = [layer.self_attn for layer in model.model.layers]
        cache, taken = DynamicCache(), []

        def keep(module: Any, inputs: tuple[Any, ...], arguments: dict[str, Any], output: tuple[Any, ...]) -> None:
            taken.append(({k: v for k, v in arguments.items() if k != "past_key_values"}, output))

        hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in self.layers]
        hidden = model.model(input_ids=ids, past_key_values=cache).last_hidden_state
        self.logits = model.lm_head(hidden[:, -1])[0]
        for hook in hooks:
            hook.remove()
        self.calls = [Call(*call, layer.keys, layer.values) for call, layer in zip(taken, cache.layers)]

    def compress(self, press: Any) -> DynamicCache:
        """The cache after a prefill under `press`; None: all of it."""
        cache = DynamicCache()
        with self._played(), press(self.model) if press is not None else contextlib.nullcontext():
            self.model.model(input_ids=self.ids, past_key_values=cache)
        return cache

    @contextlib.contextmanager
    def _played(self) -> Iterator[None]:
        """Within it, a call of the model with this context's ids plays the record; other calls compute."""
        inner = self.model.model
        compute = inner.forward

        def forward(input_ids: Tensor, past_key_values: DynamicCache, **rest: Any) -> Any:
            if input_ids is not self.ids:
                return compute(input_ids=input_ids, past_key_values=past_key_values, **rest)
            for module, call in zip(self.layers, self.calls):
                past_key_values.update(call.keys.clone(), call.values.clone(), module.layer_idx)
                module.masked_key_indices = None  # as kvpress's patched attention does in a prefill
                module.forward = lambda *_, output=call.output, **__: output
                try:
                    module(**call.arguments, past_key_values=past_key_values)
                finally:
                    del module.forward
            return None

        inner.forward = forward
        try:
            yield
        finally:
            inner.forward = compute
