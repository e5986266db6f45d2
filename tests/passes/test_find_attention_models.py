"""What is found in tiny models of transformers: each family for the feature that it brings."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from semkv.capture.export import capture
from semkv.compiler.pipeline import run_passes
from semkv.ir import spec
from semkv.ir.program import Program
from semkv.passes.base import PassOptions
from semkv.passes.canonicalise import Canonicalise
from semkv.passes.find_attention import FindAttention
from semkv.passes.pin_defaults import PinDefaults

VOCAB = 67
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
VECTORS = {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}

slow = pytest.mark.slow
FAMILIES = [
    ("Qwen3", {}, "sdpa", [{"kv_heads": 2}] * 2),
    ("Mistral", {"sliding_window": 4096}, "sdpa", [{"window": 4096}] * 2),
    ("Gemma2", {"sliding_window": 4096}, "eager", [{"softcap": 50.0, "window": 4096}, {"softcap": 50.0, "window": 0}]),
    ("GPT2", {**OLD, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 128}, "eager", [{"kv_heads": 4}]),
    ("Bloom", {**OLD, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "eager", [{"has_bias": True, "kv_heads": 4}]),
    pytest.param(
        "Mpt",
        {**OLD, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 256},
        "eager",
        [{"has_bias": True}],
        marks=slow,
    ),
    pytest.param(
        "Falcon",
        {**OLD, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "alibi": True},
        "sdpa",
        [{"has_bias": True, "kv_heads": 1}],
        marks=slow,
    ),
    pytest.param("Phi3", {}, "sdpa", [{"kv_heads": 2}] * 2, marks=slow),
    pytest.param(
        "GptOss",
        {**EXPERTS, "sliding_window": 128},
        "eager",
        [{"has_sinks": True, "window": 128}, {"has_sinks": True, "window": 0}],
        marks=slow,
    ),
    pytest.param("DeepseekV3", LATENT, "sdpa", [{"key_dim": 16, "value_dim": 6, "kv_heads": 4}] * 2, marks=slow),
    pytest.param(
        "Gemma3n",
        {**SHARED, **VECTORS},
        "sdpa",
        [{"store": 0, "window": 16}, {"store": 1}, {"store": 0, "window": 16}, {"store": 1}],
        marks=slow,
    ),
]


def build(family: str, settings: dict, implementation: str) -> PreTrainedModel:
    """A tiny random model; float64 where its experts have a kernel for it."""
    config_class = getattr(transformers, f"{family}Config")
    config_class = getattr(transformers, f"{family}TextConfig", config_class)
    settings = settings if "bos_token_id" in settings else COMMON | settings
    torch.manual_seed(0)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + head)._from_config(
        config_class(**settings), attn_implementation=implementation
    )
    grouped = family in ("GptOss", "DeepseekV3")
    return model.to(torch.float32 if grouped else torch.float64).eval()


def find(model: PreTrainedModel) -> Program:
    program = run_passes(capture(model), (Canonicalise(), PinDefaults(), FindAttention()), PassOptions())
    spec.check(program)
    return program


@pytest.mark.parametrize(("family", "settings", "implementation", "expected"), FAMILIES)
def test_a_family_s_attention_is_found(family, settings, implementation, expected) -> None:
    model = build(family, settings, implementation)
    program = find(model)
    assert len(program.sites) == len(expected)
    for site, values in zip(program.sites, expected):
        assert {name: getattr(site, name) for name in values} == values
        assert "attn" in site.name or "attention" in site.name
    for batch, length in ((2, 63), (1, 111)):
        ids = torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            expected_logits = model(ids, use_cache=False).logits
            logits = program.body(ids, torch.arange(length).expand(batch, length))
        scale = float(expected_logits.abs().max())
        # Several families take the softmax in float32 even in a float64 model.
        assert float((logits - expected_logits).abs().max()) < 1e-5 * scale
