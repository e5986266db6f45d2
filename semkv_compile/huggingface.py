"""What Hugging Face's transformers calls things, where the versions that semkv runs with differ."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if any(field.name == "cache" for field in fields(CausalLMOutputWithPast)) else "past_key_values"
"""The cache as an argument of a model, in its output and among what `generate` hands on: `past_key_values` before transformers 5.24."""
