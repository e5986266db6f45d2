"""What capture refuses before any work starts, each with a message that says what to change."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from semkv.capture.weights import check_weights
from semkv.errors import CaptureError, InputError

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
"""Names under which configurations declare the number of positions."""

HIDDEN_ATTENTION = ("flash", "flex", "paged", "kernels-community")
"""Attention implementations that hide the softmax inside a kernel of their own."""


def check_model(model: nn.Module) -> None:
    """Refuse models whose forward cannot be captured, or would be captured wrongly.

    Raises
    ------
    InputError: not a module, without parameters, or in training mode.
    CaptureError: weights that no program can read (`check_weights`), encoder-decoder, attention hidden in a kernel, or rotary
        scaling that branches in Python.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module from token ids to logits")
    name = type(model).__name__
    check_weights(model)
    if next(model.parameters(), None) is None:
        raise InputError(f"{name} has no parameters; expected a decoder with weights")
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        where = f"its module {training!r}" if training else "it"
        raise InputError(
            f"{name}: {where} is in training mode, where dropout makes every run different; call model.eval() first"
        )
    if any(tensor.is_meta for tensor in model.parameters()):
        raise InputError(f"{name} has parameters on the meta device; load its weights before compiling it")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise CaptureError(f"{name} is an encoder-decoder; expected a decoder-only model whose attention is causal")
    _check_attention_implementation(name, config)
    _check_rotary_scaling(name, model)


def _check_attention_implementation(name: str, config: Any) -> None:
    implementation = getattr(config, "_attn_implementation", None)
    if isinstance(implementation, str) and implementation.startswith(HIDDEN_ATTENTION):
        raise CaptureError(
            f"{name} uses attn_implementation={implementation!r}, whose kernel hides the attention from the graph; "
            'load the model with attn_implementation="sdpa" or "eager"'
        )


def _check_rotary_scaling(name: str, model: nn.Module) -> None:
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and "dynamic" in kind for kind in kinds):
            raise CaptureError(
                f"{name}: {path} scales rotary positions dynamically (rope_type 'dynamic'): a Python branch on the "
                "sequence's length, which a captured graph fixes; use 'linear', 'yarn' or 'llama3' scaling"
            )


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    return argument in inspect.signature(model.forward).parameters


def text_config(model: nn.Module) -> Any:
    """The configuration of the text decoder; None for a plain module without one."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    get = getattr(config, "get_text_config", None)
    return get() if callable(get) else config


def declared_context(model: nn.Module) -> int | None:
    """The number of positions that the configuration declares; None where it declares none."""
    config = text_config(model)
    found = (getattr(config, field, None) for field in CONTEXT_FIELDS)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
