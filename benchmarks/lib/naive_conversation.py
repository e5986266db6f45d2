"""A transformers model that attends to what `naive_memory` leaves of a text: its own modules, recurrent ones with their states in its own
cache, and attention in the place of the model's by transformers' interface."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from benchmarks.lib.naive_memory import METHODS, Layer

NAME = "naive_memory"
_running: list[Conversation] = []


def attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """q [1, Hq, T, D], k [1, Hkv, n, D], v [1, Hkv, n, Dv] -> [1, T, Hq, Dv]; the mask is the conversation's own business."""
    return _running[-1].attend(module, q[0], k[0], v[0], scaling).transpose(0, 1)[None], None


AttentionInterface.register(NAME, attention)


class Conversation:
    """One row of a model with a method and a budget; `method` None keeps everything.

    model: is copied, with its weights shared. logits [1, 1, vocab] after the last token; pending: the last token that `answer` made.
    """

    def __init__(self, model: nn.Module, method: str | None, budget: float) -> None:
        shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, shared)
        self.model.set_attn_implementation(NAME)
        self.method, self.budget = method, budget
        self.layers: dict[int, Layer] = {}
        self.length, self.past = 0, None
        self.surprisal = torch.zeros(0)
        self.logits: Tensor | None = None
        self.pending: Tensor | None = None
        taken = inspect.signature(model.forward).parameters
        self.cache = "cache" if "cache" in taken else "past_key_values"
        self.positions = "position_ids" in taken
        self.prompts: dict[int, tuple[Layer, Tensor, Tensor, Tensor]] = {}

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[Hq, T, Dv], of the layer that `module` is."""
        place = module.layer_idx
        if self.length and self.method is not None:
            return self.layers[place].attend(q, k, v, self.surprisal)
        if self.method is not None:
            self.layers[place] = METHODS[self.method](scale, self.budget, len(self.layers))
            self.prompts[place] = (self.layers[place], q, k, v)
        hidden = torch.arange(k.shape[1]) > torch.arange(self.length, self.length + q.shape[1])[:, None]
        own = [x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v)]
        return (q @ own[0].mT * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ own[1]

    def _run(self, tokens: Tensor) -> Tensor:
        options = {self.cache: self.past, "use_cache": True}
        if self.positions:
            options["position_ids"] = torch.arange(self.length, self.length + tokens.shape[1])[None]
        self._surprise(self.logits, tokens[:, :1])
        _running.append(self)
        try:
            with torch.no_grad():
                result = self.model(input_ids=tokens, **options)
        finally:
            _running.pop()
        self._surprise(result.logits[:, :-1], tokens[:, 1:])
        for layer, q, k, v in self.prompts.values():
            layer.prompt(q, k, v, self.surprisal)
        self.prompts = {}
        self.past, self.logits = result[self.cache], result.logits[:, -1:]
        self.length += tokens.shape[1]
        return result.logits

    def _surprise(self, logits: Tensor | None, tokens: Tensor) -> None:
        """Note how little `tokens` [1, t] were expected by logits [1, t, vocab]."""
        made = torch.zeros(tokens.shape[1])
        if logits is not None:
            made = -logits.log_softmax(-1).gather(2, tokens[..., None])[0, :, 0].float()
        self.surprisal = torch.cat([self.surprisal, made])

    def read(self, tokens: Tensor) -> Tensor:
        """Logits [1, T, vocab] after each of `tokens` [1, T]: a prompt at once, a turn in pieces as its memory has room."""
        out, start = [], 0
        while start < tokens.shape[1]:
            at_once = tokens.shape[1]
            if self.length and self.layers:
                at_once = min(layer.chunk() for layer in self.layers.values())
            out.append(self._run(tokens[:, start : start + at_once]))
            start += at_once
        return torch.cat(out, 1)

    def go_on(self, tokens: Tensor) -> Tensor:
        """`read` of what is pending and `tokens`."""
        behind = tokens if self.pending is None else torch.cat([self.pending, tokens], 1)
        self.pending = None
        return self.read(behind)

    def answer(self, tokens: Tensor, count: int) -> list[int]:
        """`count` greedy tokens after `tokens` [1, T] and what is pending."""
        logits = self.go_on(tokens)
        made = []
        for number in range(count):
            self.pending = logits[:, -1].argmax(-1, keepdim=True)
            made.append(int(self.pending))
            if number + 1 < count:
                logits = self.read(self.pending)
        return made

    def fork(self) -> Conversation:
        """A copy that goes its own way."""
        shared = {id(self.model): self.model}
        return copy.deepcopy(self, shared)


__all__ = ["Conversation"]
