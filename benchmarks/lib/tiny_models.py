"""Tiny random models of any transformers architecture, made to depend on their whole context.

The configuration of a class is shrunk by the names of its fields, which most architectures share; weights are drawn so
that attention matters: with the usual initialisation the output of many tiny models hardly depends on the prompt, and a
test on them proves nothing.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT, WINDOW, BLOCK = 64, 4, 2, 16, 199, 512, 32, 16

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "emb_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "dim_head", "global_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff", "dim_ff", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_num_shared_experts", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "n_words"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), CONTEXT),
    **dict.fromkeys(("model_max_length", "max_target_positions", "max_source_positions", "seq_length"), CONTEXT),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "keep_window_size", "local_attention_window_len", "chunk_size"), WINDOW),
    **dict.fromkeys(("mamba_chunk_size", "local_attn_chunk_length", "lsh_attn_chunk_length", "mem_len"), WINDOW),
    **dict.fromkeys(("block_size", "index_block_size", "index_topk"), BLOCK),
    "index_topk_blocks": 4,
    "original_max_position_embeddings": 2 * WINDOW,
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), HIDDEN),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24),
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 12,
    "rotary_dim": 8,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "mamba_d_head"), HEAD_DIM),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), HEADS),
    "linear_num_key_heads": KV_HEADS,
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"), 2 * HEADS),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 16),
    "mamba_d_ssm": 2 * HIDDEN,
    "mamba_headdim": HEAD_DIM,
    "hidden_size_per_layer_input": 8,
    "query_pre_attn_scalar": HEAD_DIM,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "tie_word_embeddings": None,
}
"""What a field of this name becomes; a field that is None by default stays so, except token ids."""

LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"),
    *("num_decoder_layers", "num_encoder_layers"),
)
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_global_key_value_heads")

SPAN = re.compile(
    r"window(?!_layers|_pattern)|chunk|block_size|local_attention|conv_kernel|conv1d_width|d_conv|conv_L_cache"
    r"|original_max_position_embeddings|index_topk$|mem_len|context_length|short_conv"
)
"""Names of fields that count tokens, the context itself left out."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "falcon": {"num_kv_heads": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": 96,
    },
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": HEAD_DIM, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "dots3_note_text": {"head_dim": 24},
    "moshi": {"sliding_window": CONTEXT},  # its mask ignores the window, which only its cache knows
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": HIDDEN, "attention_window_size": WINDOW},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "num_hidden_layers": 2,
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM},
        **{"indexer_budget": BLOCK, "indexer_compress_ratio": 4, "hc_lowrank": 8},
        **{"ngram_vocab_size_base": 100, "ple_embed_dim": 8, "split_ngram_parts": 1},
    },
    "zamba": {
        "num_hidden_layers": 6,  # fewer have no layer that shares another's attention
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "attention_head_dim": 2 * HIDDEN // HEADS,
        "attention_hidden_size": 2 * HIDDEN,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that the rules by name do not get right, per architecture."""

for _name in (
    "bert-generation",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
):
    OVERRIDES[_name] = {"is_decoder": True}
for _name in ("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "git"):
    OVERRIDES[_name] = {"is_decoder": True}


def architectures() -> dict[str, str]:
    """Model type -> class name, of all causal language models that the installed transformers has."""
    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def tiny_config(model_type: str):
    """The shrunk configuration of an architecture."""
    defaults = AutoConfig.for_model(model_type)
    return type(defaults)(**_shrink(defaults.to_dict()))


def _shrink(defaults: dict[str, Any]) -> dict[str, Any]:
    """The fields to set, by name; sub-configurations are shrunk alike."""
    layers = next((defaults[name] for name in LAYER_COUNTS if isinstance(defaults.get(name), int)), None)
    kept = _kept_layers(defaults, layers)
    heads = next(
        (defaults[n] for n in ("num_attention_heads", "n_head", "num_heads") if isinstance(defaults.get(n), int)), 0
    )
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        if name == "tie_word_embeddings" or name.startswith("_"):
            continue
        if name.endswith("_token_id"):
            fields[name] = SIZES.get(name, 3) if name in SIZES or isinstance(value, int) else value
        elif name == "per_layer_config" and isinstance(value, dict):
            given = {int(layer): what for layer, what in value.items()}
            fields[name] = {new: _shrink(given[old]) for new, old in enumerate(kept) if old in given}
        elif name == "head_dim" and value is not None and value == defaults.get("qk_rope_head_dim"):
            fields[name] = SIZES["qk_rope_head_dim"]
        elif name in LAYER_COUNTS and isinstance(value, int):
            fields[name] = len(kept)
        elif name in KV_HEAD_COUNTS and isinstance(value, int):
            fields[name] = HEADS if value == heads else (1 if value == 1 else KV_HEADS)
        elif isinstance(value, list) and layers and len(value) == layers:
            fields[name] = [value[i] for i in kept]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = SIZES[name]
        elif isinstance(value, dict) and (
            name.endswith("_config") or name in ("decoder", "text_encoder", "audio_encoder")
        ):
            fields[name] = {**value, **_shrink(value)}
        elif isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            fields[name] = _shrink_rope(value)
    return fields | OVERRIDES.get(defaults.get("model_type", ""), {})


def _shrink_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary scaling with its original context shrunk; one for all layers, or one for each kind of layer."""
    name = "original_max_position_embeddings"
    shrunk = {key: _shrink_rope(value) if isinstance(value, dict) else value for key, value in parameters.items()}
    return shrunk | ({name: SIZES[name]} if isinstance(parameters.get(name), int) else {})


def spans(config: Any) -> dict[str, int]:
    """The constants of a configuration that count tokens, by their names: windows, chunks, blocks, original contexts."""
    found: dict[str, int] = {}

    def collect(fields: dict[str, Any], path: str) -> None:
        for name, value in fields.items():
            if isinstance(value, dict):
                collect(value, f"{path}{name}.")
            elif isinstance(value, int) and not isinstance(value, bool) and value > 1 and SPAN.search(str(name)):
                found[f"{path}{name}"] = value

    collect(config.get_text_config(decoder=True).to_dict(), "")
    return found


def _kept_layers(defaults: dict[str, Any], layers: int | None) -> list[int]:
    """Layers that show every kind that the per-layer lists name; at least two."""
    if not layers:
        return [0, 1]
    kept: set[int] = set()
    for value in defaults.values():
        if isinstance(value, list) and len(value) == layers:
            first: dict[str, int] = {}
            for index, kind in enumerate(value):
                first.setdefault(repr(kind), index)
            if len(first) <= 4:
                kept.update(first.values())
    for index in range(layers):
        if len(kept) >= 2:
            break
        kept.add(index)
    return sorted(kept)


def tiny_model(model_type: str, *, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A tiny random model in evaluation mode whose output depends on its context."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    sensitise(model)
    model = model.to(dtype).eval()
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generation.pad_token_id = 0
    generation.no_repeat_ngram_size = generation.encoder_no_repeat_ngram_size = 0
    generation.min_length = 0
    generation.num_beams = 1
    generation.max_length = None
    return model


def sensitise(model: PreTrainedModel) -> None:
    """Draw weights of unit gain, a larger gain in attention, and biases that are not zero."""
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(0.5 * noise)
            elif parameter.dim() >= 2:
                gain = 1.6 if "att" in name else 1.0
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
