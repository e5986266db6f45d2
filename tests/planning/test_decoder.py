"""Sizes from configurations alone, against published numbers, real weights and captured sites."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    T5Config,
)

from semkv.compiler.pipeline import captured_program, on_latents
from semkv.errors import ConfigError
from semkv.planning.decoder import Decoder, LayerCache, decoder_of, load_config

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
WINDOWED = {
    **SMALL,
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None
    ),
    "mixture": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=1),
    "windows": Gemma3TextConfig(**WINDOWED),
    "latent": DeepseekV3Config(**LATENT),
}


def test_a_published_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    found = decoder_of(load_config(str(path)))
    assert found.parameters == 8_030_261_248
    assert found.weights == 2 * found.parameters
    assert found.dense == 2 * (found.parameters - 128256 * 4096)  # of the embedding table a step reads a row
    assert found.layers == (LayerCache(2048, 8, 128, 128),) * 32
    assert sum(layer.exact_bytes(found.itemsize) for layer in found.layers) == 131072
    assert (found.context, found.experts) == (131072, 0)
    assert decoder_of(load_config(str(tmp_path)), dtype="float32").weights == 2 * found.weights


@pytest.mark.parametrize("name", list(FAMILIES))
def test_sizes_are_those_of_the_built_model(name):
    config = FAMILIES[name]
    found = decoder_of(config, dtype="float32")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.weights == sum(p.nbytes for p in model.parameters())
    table = model.get_input_embeddings().weight
    untied = model.get_output_embeddings().weight is not table
    experts = sum(p.nbytes for path, p in model.named_parameters() if ".experts." in path)
    assert found.experts == experts
    assert found.dense == found.weights - experts - (table.nbytes if untied else 0)
    assert bool(experts) == (name in ("mixture", "latent"))


@pytest.mark.parametrize("name", ["windows", "latent"])
def test_layers_are_the_sites_that_capture_finds(name):
    config = copy.deepcopy(FAMILIES[name])
    if name == "latent":
        config.num_hidden_layers = 1
    found = decoder_of(config, dtype="float32")
    torch.manual_seed(0)
    sites = captured_program(AutoModelForCausalLM.from_config(config).eval()).stores
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in sites] == [
        (x.kv_heads, x.key_dim, x.value_dim) for x in found.layers
    ]
    assert [bool(s.window) for s in sites] == [bool(x.window) for x in found.layers]
    assert {s.window for s in sites if s.window} == {x.window for x in found.layers if x.window}


def test_latent_layers_cache_less_than_attention_reads():
    layers = decoder_of(FAMILIES["latent"], dtype="bfloat16").layers
    assert [layer.latent for layer in layers] == [True, True]
    assert layers[0] == LayerCache(24 + 8, 4, 24, 12, rank=24)


def test_layers_on_latents_are_the_sites_of_the_program_on_latents():
    config = copy.deepcopy(FAMILIES["latent"])
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    sites = on_latents(captured_program(AutoModelForCausalLM.from_config(config).eval())).stores
    found = decoder_of(config, dtype="float32").on_latents()
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in sites] == [(1, 32, 24)]
    assert [(x.kv_heads, x.key_dim, x.value_dim) for x in found.layers] == [(1, 32, 24)]
    with pytest.raises(ConfigError, match=r"Llama: --latents is for multi-head latent attention"):
        decoder_of(FAMILIES["llama"]).on_latents()


def test_experts_read_by_a_batch():
    found = Decoder("x", 0, 0, 100, 80, 1 / 4, (), 2, None)
    assert found.read_bytes(1) == 120
    assert found.read_bytes(2) == pytest.approx(100 + 80 * (1 - (3 / 4) ** 2))
    assert found.read_bytes(1000) == pytest.approx(180)


def test_waiting_bytes():
    layer = LayerCache(256, 2, 64, 64)
    assert [layer.waiting_bytes(form, 2) for form in ("raw", "int8", "none")] == [512, 2 * 2 * 66, 0]


def test_weights_of_a_quantised_checkpoint():
    config = LlamaConfig(**SMALL, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"Llama: the checkpoint is quantised.*pass --weights"):
        decoder_of(config, dtype="bfloat16")
    plain, half = (decoder_of(FAMILIES["llama"], dtype="bfloat16", weights=n) for n in (None, 1000))
    assert half.weights == 1000
    assert half.dense == round(1000 * plain.dense / plain.weights)
    assert decoder_of(config, dtype="bfloat16", weights=1000) == half


@pytest.mark.parametrize(
    ("config", "dtype", "said"),
    [
        (LlamaConfig(**SMALL), None, "the configuration names no dtype: pass --dtype, one of float32"),
        (LlamaConfig(**SMALL), "int4", "dtype int4: pass --dtype"),
        (T5Config(), "float32", "T5: transformers builds no causal LM from this configuration"),
        (MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1), "float32", "Mamba: "),
    ],
)
def test_refusals(config, dtype, said):
    with pytest.raises(ConfigError, match=said):
        decoder_of(config, dtype=dtype)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no configuration"),
        ("[]", "no model_type in it"),
        ('{"model_type": "abacus"}', "no configuration .*abacus"),
    ],
)
def test_files_that_are_no_configuration(text, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(str(path))
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_config(str(tmp_path / "none"))
