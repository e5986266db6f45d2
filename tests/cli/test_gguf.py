"""GGUF files as models: a file, or a folder with one, is the model that was written into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from semkv.cli.gguf import gguf_file
from semkv.cli.models import load_weights
from semkv.errors import ConfigError

gguf = pytest.importorskip("gguf")

WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "ab", "Ġa"]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def write(model: LlamaForCausalLM, path: Path) -> None:
    """As llama.cpp writes a Llama in float32: halves of the rotary pairs of queries and keys interleaved."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    write(tiny_llama(), path / "tiny.gguf")
    return path


def test_a_file_and_a_folder_with_one_are_the_model(folder):
    ids = torch.arange(3, 23)[None]
    expected = tiny_llama()(ids).logits
    for name in (folder / "tiny.gguf", folder):
        model, tokenizer = load_weights(str(name))
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert not model.training
        assert tokenizer.decode(tokenizer("ab a", add_special_tokens=False).input_ids) == "ab a"


def test_a_loaded_model_is_a_plain_one(folder, tmp_path):
    """It is saved and read as any other."""
    model, tokenizer = load_weights(str(folder))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load_weights(str(tmp_path))
    assert all(torch.equal(x, y) for x, y in zip(again.state_dict().values(), model.state_dict().values(), strict=True))


def test_what_is_no_model_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.gguf: no such file"):
        load_weights(str(tmp_path / "nothing.gguf"))
    (tmp_path / "broken.gguf").write_bytes((folder / "tiny.gguf").read_bytes()[:700])
    with pytest.raises(ConfigError, match=r"broken\.gguf: this GGUF file cannot be loaded"):
        load_weights(str(tmp_path / "broken.gguf"))
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files \(broken\.gguf, other\.gguf\); name one of them"):
        load_weights(str(tmp_path))


def test_a_plan_reads_its_sizes(folder, run):
    result = run("plan", "--model", folder / "tiny.gguf", "--gpu", "h100", "--context", 64, "--budget", "full")
    assert result.exit_code == 0, result.output
    assert "2 layers; KV 256 B per token" in result.output  # 2 layers, 2 KV heads of 8, keys and values in float32


def test_a_folder_with_a_configuration_is_read_as_such(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "also.gguf").write_bytes(b"GGUF")
    assert gguf_file(tmp_path) is None
    assert gguf_file(folder) == folder / "tiny.gguf"
    assert gguf_file(tmp_path / "nowhere") is None
