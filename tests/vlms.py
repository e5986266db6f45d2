"""Tiny vision-language models of transformers with random weights, prompts with images for them, and what such a model does by itself."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

IMAGE, START, END, VOCAB = 195, 197, 198, 200
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
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 196}
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
    model = getattr(transformers, kind)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            if tensor.dim() > 1:
                scale = 1.0 if "embed_tokens" in path else 1.2 / tensor[0].numel() ** 0.5
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return model


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
