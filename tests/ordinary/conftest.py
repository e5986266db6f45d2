"""A small Llama whose tokens depend on what was read long before, and ids for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import semkv

VOCAB = 41


def tiny_llama(
    *, dtype: torch.dtype = torch.float64, context: int = 300, layers: int = 2, seed: int = 0
) -> LlamaForCausalLM:
    """Random weights, large enough that tokens depend on what was read long before."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


def some_ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """int64 [rows, tokens], none of them padding."""
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    """`make_llama(dtype=..., context=..., layers=..., seed=...)`: a model of its own."""
    return tiny_llama


@pytest.fixture(scope="session")
def ids() -> Callable[..., torch.Tensor]:
    """`ids(tokens, rows, seed)`: int64 [rows, tokens]."""
    return some_ids


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    """In float64; tests share it and leave it as it is."""
    return tiny_llama()


@pytest.fixture(scope="session")
def full(model) -> semkv.CompiledModel:
    """`model`, compiled to keep everything."""
    return semkv.compile(model)


@pytest.fixture(scope="session")
def small(full) -> semkv.CompiledModel:
    """`model` with half of its KV and no floor. The method's smallest budget is 24 tokens: rows below 48 have no room."""
    return full.with_method("snapkv", 0.5, config=semkv.CompileConfig(floor=0))
