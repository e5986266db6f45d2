"""A decoder's sizes from its configuration: the model is built on torch's meta device, where tensors have shapes and no memory.

What each layer caches is asked of transformers itself, by one forward on that device into an empty cache: sliding windows, latent
keys (MLA), layers that share a cache and grouped heads need no rule of ours.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from semkv.errors import ConfigError
from semkv.model.huggingface import CACHE
from semkv.runtime.store.quantization import bytes_per_vector

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache, per row.

    cached: numbers per token as transformers caches them. kv_heads, key_dim, value_dim: as attention reads them, which is what
    a semkv program holds; a latent cache is smaller. window: tokens that the layer keeps; 0: all. rank: numbers of the latent of which
    the heads are made; 0: they are made of none.
    """

    cached: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    rank: int = 0

    @property
    def latent(self) -> bool:
        return self.cached != self.kv_heads * (self.key_dim + self.value_dim)

    def on_latents(self) -> LayerCache:
        """As `CompileConfig(latents=True)` holds it: the latent and what heads share of the key as key, the latent as value. The
        layer itself where it has no latent, or where that is no less."""
        absorbed = replace(self, kv_heads=1, key_dim=self.cached, value_dim=self.rank)
        return absorbed if self.rank and absorbed.exact_bytes(1) < self.exact_bytes(1) else self

    def exact_bytes(self, itemsize: int) -> int:
        """Of one token at full resolution, as attention reads it."""
        return self.kv_heads * (self.key_dim + self.value_dim) * itemsize

    def waiting_bytes(self, form: str, itemsize: int) -> int:
        """Of one folded token that waits as `raw` numbers or as `int8`; `none`: it is dropped."""
        if form == "none":
            return 0
        if form == "raw":
            return self.exact_bytes(itemsize)
        return self.kv_heads * (bytes_per_vector(self.key_dim, 8) + bytes_per_vector(self.value_dim, 8))


@dataclass(frozen=True)
class Decoder:
    """What a plan needs to know of a model.

    parameters: their number. weights: their bytes. dense: bytes that every step reads (all but an untied embedding table and
    experts). experts: bytes of all routed experts. expert_share: of a layer's experts, those that one token is routed to.
    itemsize: bytes of a number of the KV. context: declared positions, None where none are. hidden: numbers of a token between layers.
    """

    name: str
    parameters: int
    weights: int
    dense: int
    experts: int
    expert_share: float
    layers: tuple[LayerCache, ...]
    itemsize: int
    context: int | None
    hidden: int = 0

    def on_latents(self) -> Decoder:
        """The decoder whose memory holds latents; `ConfigError` where no layer has any that are smaller than its heads."""
        layers = tuple(layer.on_latents() for layer in self.layers)
        if layers == self.layers:
            raise ConfigError(
                f"{self.name}: --latents is for multi-head latent attention, and no layer of this model has it"
            )
        return replace(self, layers=layers)

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a step of `rows` rows reads: of experts, those expected if every row draws its own."""
        return self.dense + self.experts * (1 - (1 - self.expert_share) ** rows)


def load_config(source: str) -> Any:
    """The configuration in a json file or folder, or of a Hugging Face name; `ConfigError` where there is none."""
    from transformers import AutoConfig

    path = Path(source).expanduser()
    try:
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
                raise ValueError("no model_type in it")
            return AutoConfig.for_model(**values)
        if not path.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
            raise OSError("no such file or folder")
        return AutoConfig.from_pretrained(str(path) if path.is_dir() else source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model {source}: no configuration ({first}); give a config.json, its folder, a Hugging Face name, or `bundled`"
        ) from error


def decoder_of(config: Any, *, dtype: str | None = None, weights: int | None = None) -> Decoder:
    """The sizes of the causal LM that transformers builds from `config`; needs no weights and no memory for them.

    Parameters
    ----------
    dtype: of weights and KV; default: the configuration's.
    weights: bytes of the checkpoint, where it is quantised; what a step reads is scaled with it.

    Raises
    ------
    ConfigError: not a decoder that transformers knows, a dtype or weights that are not known, or a layer whose cache is not
        keys and values.
    """
    name = type(config).__name__.removesuffix("Config")
    config = config.get_text_config()
    number = _dtype(config, dtype)
    if getattr(config, "quantization_config", None) and weights is None:
        raise ConfigError(
            f"{name}: the checkpoint is quantised, in a form that the configuration does not give sizes for: pass --weights with the "
            "checkpoint's size, such as --weights 40GB"
        )
    model: Any = _on_meta(config, number, name)
    unique = {id(p): (path, p) for path, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    sizes = {path: p.nbytes for path, p in unique.values()}
    total = sum(sizes.values())
    experts = sum(size for path, size in sizes.items() if ".experts." in path)
    scale = 1.0 if weights is None else weights / total
    return Decoder(
        name=name,
        parameters=sum(p.numel() for _, p in unique.values()),
        weights=total if weights is None else weights,
        dense=round((total - experts - _looked_up(model)) * scale),
        experts=round(experts * scale),
        expert_share=_expert_share(config, name) if experts else 0.0,
        layers=_layers(model, config, name),
        itemsize=number.itemsize,
        context=getattr(config, "max_position_embeddings", None),
        hidden=model.get_input_embeddings().weight.shape[1],
    )


def _dtype(config: Any, asked: str | None) -> torch.dtype:
    found = asked if asked is not None else getattr(config, "dtype", None)
    number = DTYPES.get(str(found).removeprefix("torch."))
    if number is None:
        said = "the configuration names no dtype" if found is None else f"dtype {found}"
        raise ConfigError(f"{said}: pass --dtype, one of {', '.join(DTYPES)}")
    return number


def _on_meta(config: Any, dtype: torch.dtype, name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager", experts_implementation="batched_mm"
            ).eval()
    except Exception as error:  # the model's own Python may raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{name}: transformers builds no causal LM from this configuration ({first})") from error


def _looked_up(model: Any) -> int:
    """Bytes of an embedding table of which a step reads a row; a tied one is read whole for the logits."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return 0 if head is None or getattr(head, "weight", None) is table else table.nbytes


def _expert_share(config: Any, name: str) -> float:
    count, chosen = (
        next((value for key in keys if isinstance(value := getattr(config, key, None), int) and value > 0), None)
        for keys in (EXPERTS, EXPERTS_PER_TOKEN)
    )
    if count is None or chosen is None:
        raise ConfigError(
            f"{name} has experts, but none of {', '.join(EXPERTS + EXPERTS_PER_TOKEN)} says how many a token is routed to"
        )
    return min(1.0, chosen / count)


def _layers(model: nn.Module, config: Any, name: str) -> tuple[LayerCache, ...]:
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    try:
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
            used = model(input_ids=ids, use_cache=True, **{CACHE: cache})[CACHE]
            held = list(used.layers)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{name}: its layers' caches cannot be read from a forward on the meta device ({type(error).__name__}: {first})"
        ) from error
    layers = []
    for place, layer in enumerate(held):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states"):
            raise ConfigError(
                f"{name}: layer {place} keeps a {type(layer).__name__} beside or instead of keys and values, which semkv does not "
                "compile"
            )
        if keys is None or values is None:
            continue  # a layer that reads another's cache
        layers.append(_layer(keys, values, getattr(layer, "sliding_window", None) or 0, config, name, place))
    if not layers:
        raise ConfigError(f"{name}: its forward caches no keys and values")
    return tuple(layers)


def _layer(keys: torch.Tensor, values: torch.Tensor, window: int, config: Any, name: str, place: int) -> LayerCache:
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[2] != 2:
        raise ConfigError(
            f"{name}: layer {place} caches {tuple(keys.shape)} and {tuple(values.shape)} for two tokens, expected [1, heads, 2, dim]"
        )
    cached = math.prod(keys.shape) // 2 + math.prod(values.shape) // 2
    rank, rope = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if rank and rope and cached == rank + rope:  # multi-head latent attention: heads are made of it as attention reads
        return LayerCache(
            cached, config.num_attention_heads, config.qk_nope_head_dim + rope, config.v_head_dim, window, rank
        )
    return LayerCache(cached, keys.shape[1], keys.shape[3], values.shape[3], window)
