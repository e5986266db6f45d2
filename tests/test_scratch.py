"""What a module's forward writes into itself is a note; what else is written is a change of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.errors import StaleModelError
from semkv.live.scratch import written_by_forward

VOCAB = 41


def llama() -> LlamaForCausalLM:
    config = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, **config)).eval()


class Noting(nn.Module):
    """Its forward leaves a note of its last run, and reads a tensor that only a setter sets."""

    def __init__(self, inner: LlamaForCausalLM) -> None:
        super().__init__()
        self.inner = inner
        self.last: Tensor | None = None
        self.shift: Tensor | None = None

    def set_shift(self, shift: Tensor) -> None:
        self.shift = shift

    def _note(self, logits: Tensor) -> None:
        self.last = logits[:, -1].detach()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = self.inner(input_ids, position_ids=position_ids, use_cache=False).logits
        self._note(logits)
        return logits if self.shift is None else logits + self.shift


def test_names_are_found_through_methods() -> None:
    assert {"last"} <= written_by_forward(Noting)
    assert "shift" not in written_by_forward(Noting)
    assert written_by_forward(nn.Linear) == frozenset()


def test_a_note_of_the_models_own_forward_is_no_change() -> None:
    model = Noting(llama()).eval()
    compiled = semkv.compile(model, method="full")
    ids = torch.arange(1, 9)[None]
    before = compiled(ids).logits
    model(ids + 1)
    assert model.last is not None
    assert torch.equal(compiled(ids).logits, before)
    model.set_shift(torch.ones(VOCAB))
    with pytest.raises(StaleModelError, match="shift: None -> a Tensor"):
        compiled(ids)
