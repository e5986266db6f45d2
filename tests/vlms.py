"""Tiny vision-language models of transformers with random weights, prompts with images for them, and what such a model does by itself."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

IMAGE, VIDEO, START, END, VOCAB = 195, 196, 197, 198, 200
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
QWEN = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 100.0}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_heads": 2}
NAMES = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3")
MROPE = ("qwen2_5_vl", "qwen3_vl")


def _config(name: str) -> tuple[str, Any]:
    if name == "qwen2_5_vl":
        vision = PATCHES | {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "window_size": 16}
        text = TEXT | {"rope_parameters": QWEN}
        vision["fullatt_block_indexes"] = [1]
        made = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS)
        return "Qwen2_5_VLForConditionalGeneration", made
    if name == "qwen3_vl":
        vision = PATCHES | {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 64}
        text = TEXT | {"head_dim": 16, "num_hidden_layers": 3, "rope_parameters": QWEN | {"mrope_interleaved": True}}
        vision["deepstack_visual_indexes"] = [0, 1]
        return "Qwen3VLForConditionalGeneration", transformers.Qwen3VLConfig(
            text_config=text, vision_config=vision, **TOKENS
        )
    if name == "llava":
        made = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT),
            vision_config=transformers.CLIPVisionConfig(
                **TOWER | {"num_hidden_layers": 2}, image_size=32, patch_size=8
            ),
            image_token_id=IMAGE,
        )
        return "LlavaForConditionalGeneration", made
    kinds = ["sliding_attention", "full_attention"]
    text = TEXT | {"head_dim": 16, "sliding_window": 24, "layer_types": kinds, "query_pre_attn_scalar": 16}
    made = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=transformers.SiglipVisionConfig(**TOWER, image_size=32, patch_size=8),
        mm_tokens_per_image=16,
        image_token_id=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return "Gemma3ForConditionalGeneration", made


def vlm(name: str) -> nn.Module:
    """A model whose logits depend on the content, the order and the positions of what it reads."""
    kind, config = _config(name)
    config.tie_word_embeddings = False
    return _sensitive(getattr(transformers, kind)(config))


def _sensitive(model: nn.Module) -> nn.Module:
    """The model with weights that let much of what it reads through."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            if tensor.dim() > 1:
                scale = 1.0 if "embed_tokens" in path else 1.2 / tensor[0].numel() ** 0.5
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return model.eval()


def images(name: str, sizes: tuple[int, ...], texts: tuple[tuple[int, int], ...], seed: int = 0) -> dict[str, Tensor]:
    """A batch, padded on the left, of a row per image, between texts of so many tokens; what a processor makes of it.

    sizes: rows of patches in an image of eight columns, where the model takes images of any size.
    """
    words, pixels = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    rows, patches, grids = [], [], []
    for size, (before, after) in zip(sizes, texts, strict=True):
        text = torch.randint(10, 190, (before + after,), generator=words)
        if name in MROPE:
            grids.append([1, size, 8])
            patches.append(torch.randn(8 * size, 3 * 2 * 16, generator=pixels))
            inside = torch.tensor([START, *[IMAGE] * (2 * size), END])
        else:
            patches.append(torch.randn(1, 3, 32, 32, generator=pixels))
            inside = torch.full((16,), IMAGE)
        rows.append(torch.cat([text[:before], inside, text[before:]]))
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    made = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.cat(patches)}
    if name in MROPE:
        made |= {"image_grid_thw": torch.tensor(grids), "mm_token_type_ids": (ids == IMAGE).int()}
    if name == "gemma3":
        made["token_type_ids"] = (ids == IMAGE).int()
    return made


@torch.no_grad()
def own_logits(model: nn.Module, prompt: dict[str, Tensor], turns: list[Tensor]) -> list[Tensor]:
    """Logits [B, T, vocab] of a prompt and of each of the turns [B, T] behind it, by the model's own code with its cache."""
    mask, several = prompt["attention_mask"], hasattr(model.model, "rope_deltas")
    places = mask.cumsum(1).sub(1).clamp(min=0)
    out = model(**prompt, **({} if several else {"position_ids": places}), use_cache=True)
    logits = [out.logits]
    for turn in turns:
        mask = torch.cat([mask, torch.ones_like(turn)], 1)
        places = mask.cumsum(1).sub(1)[:, -turn.shape[1] :]
        if several:
            places = (places + model.model.rope_deltas).expand(3, *places.shape)
        cache = {"cache": out.cache} if "cache" in out else {"past_key_values": out.past_key_values}
        out = model(input_ids=turn, attention_mask=mask, position_ids=places, use_cache=True, **cache)
        logits.append(out.logits)
    return logits


def _patches(kind: str, config: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with patches in a grid, as Qwen's, and a prompt."""
    prompt = _around(16)
    prompt |= {"pixel_values": _noise(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    prompt["mm_token_type_ids"] = (prompt["input_ids"] == IMAGE).int()
    return getattr(transformers, kind)(config), prompt


def _around(tokens: int) -> dict[str, Tensor]:
    text = torch.randint(10, 190, (1, 30), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([text[:, :12], torch.full((1, tokens), IMAGE), text[:, 12:]], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def other(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of another family, for which nothing was written, and a prompt with an image for it."""
    llama = transformers.LlamaConfig(**TEXT)
    small = {"image_size": 32, "patch_size": 8}
    if name == "qwen2_vl":
        vision = PATCHES | {"depth": 1, "embed_dim": 32, "hidden_size": 64}
        made = transformers.Qwen2VLConfig(text_config=TEXT | {"rope_parameters": QWEN}, vision_config=vision, **TOKENS)
        model, prompt = _patches("Qwen2VLForConditionalGeneration", made)
    elif name == "glm4v":
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        vision = PATCHES | {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "image_size": 32}
        tokens = {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
        made = transformers.Glm4vConfig(
            text_config=TEXT | {"head_dim": 16, "rope_parameters": rope}, vision_config=vision, **tokens
        )
        model, prompt = _patches("Glm4vForConditionalGeneration", made)
    elif name == "smolvlm":
        vision = transformers.SmolVLMVisionConfig(**TOWER, **small)
        made = transformers.SmolVLMConfig(
            text_config=llama, vision_config=vision, scale_factor=2, image_token_id=IMAGE, pad_token_id=0
        )
        model = transformers.SmolVLMForConditionalGeneration(made)
        prompt = _around(4) | {"pixel_values": _noise(1, 1, 3, 32, 32)}
    elif name == "mistral3":
        text = transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None)
        vision = transformers.PixtralVisionConfig(**TOWER, **small, head_dim=16)
        made = transformers.Mistral3Config(
            text_config=text, vision_config=vision, image_token_index=IMAGE, spatial_merge_size=2
        )
        model = transformers.Mistral3ForConditionalGeneration(made)
        prompt = _around(4) | {"pixel_values": _noise(1, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]])}
    elif name == "internvl":
        vision = transformers.InternVLVisionConfig(**TOWER, image_size=[32, 32], patch_size=[8, 8])
        made = transformers.InternVLConfig(
            vision_config=vision,
            text_config=transformers.Qwen2Config(**TEXT),
            image_token_id=IMAGE,
            downsample_ratio=0.5,
        )
        model = transformers.InternVLForConditionalGeneration(made)
        prompt = _around(4) | {"pixel_values": _noise(1, 3, 32, 32)}
    elif name == "llava_next":
        vision = transformers.CLIPVisionConfig(**TOWER | {"num_hidden_layers": 2}, **small)
        made = transformers.LlavaNextConfig(
            vision_config=vision,
            text_config=llama,
            image_token_index=IMAGE,
            image_grid_pinpoints=[[32, 32]],
            image_token_id=IMAGE,
        )
        model = transformers.LlavaNextForConditionalGeneration(made)
        prompt = _around(36) | {"pixel_values": _noise(1, 2, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]])}
    else:
        text = TEXT | {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        vision = {"hidden_size": 32, "intermediate_size": 48, "attention_heads": 2, "num_hidden_layers": 2, **small}
        vision |= {"num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [0]}
        vision |= {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
        model = transformers.MllamaForConditionalGeneration(
            transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
        )
        prompt = _around(1)
        ones = torch.ones(1, prompt["input_ids"].shape[1], 1, 1, dtype=torch.int64)
        prompt |= {"pixel_values": _noise(1, 1, 1, 3, 32, 32), "cross_attention_mask": ones}
        prompt |= {"aspect_ratio_ids": ones[:, 0, 0], "aspect_ratio_mask": ones[:, :1, 0]}
    return _sensitive(model), prompt
