"""A tiny random model on disk, with the bundled tokenizer."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from semkv.profiles.bundled.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a two-layer Llama with 512 positions."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run():
    """Run the `semkv` command in this process; returns its result."""
    from semkv.cli.main import app

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke
