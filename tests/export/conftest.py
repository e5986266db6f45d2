"""The bundled model, compiled once."""

from __future__ import annotations

import pytest

import semkv
from semkv.compiled import CompiledModel


@pytest.fixture(scope="package")
def full() -> CompiledModel:
    """The bundled model with its profile, which keeps everything."""
    model, _ = semkv.bundled.load()
    return semkv.compile(model, semkv.bundled.profile(), method="full")


@pytest.fixture(scope="package")
def tiny() -> CompiledModel:
    """A Llama of one layer and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=97, num_hidden_layers=1, max_position_embeddings=2048, initializer_range=0.3, **sizes
    )
    return semkv.compile(LlamaForCausalLM(config).eval(), method="full")
