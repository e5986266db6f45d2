"""What Hugging Face's transformers calls things, where the versions that semkv runs with differ, and what it has to be told."""

from __future__ import annotations

from dataclasses import fields

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if any(field.name == "cache" for field in fields(CausalLMOutputWithPast)) else "past_key_values"
"""The cache as an argument of a model, in its output and among what `generate` hands on: `past_key_values` before transformers 5.24."""


class CompiledConfig(PreTrainedConfig):
    """Under which compiled models are registered; each has the configuration of the model that was compiled."""

    model_type = "semkv"


def register_causal_lm(kind: type) -> None:
    """Make models of class `kind` known as causal language models, so that `transformers.pipeline` takes one without a warning."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:  # an artifact runs without transformers' models, and so without its pipelines
        return
    AutoModelForCausalLM.register(CompiledConfig, kind, exist_ok=True)
