"""Inputs that a program does not take: it reads token ids and positions."""

from __future__ import annotations

import inspect
import re
import traceback

import torch
from torch import nn

from semkv.capture.checks import accepts
from semkv.errors import CaptureError

GIVEN = frozenset({"input_ids", "position_ids"})
"""What a captured forward is given."""

OPTIONS = frozenset(
    {
        *("attention_mask", "inputs_embeds", "past_key_values", "cache", "cache_params", "cache_position", "labels"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("logits_to_keep", "num_logits_to_keep", "head_mask"),
    }
)
"""What a decoder runs without."""


def check_inputs(model: nn.Module) -> None:
    """Refuse a forward that requires more than token ids and positions.

    Raises
    ------
    CaptureError: naming what it requires.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    if not accepts(model, "input_ids"):
        parameters = parameters[1:]  # ids go first, by whatever name
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.kind in plain and p.default is p.empty and p.name not in GIVEN]
    if required:
        raise CaptureError(
            f"the forward of {type(model).__name__} requires {_listed(required)}; a program takes token ids and positions "
            "only. Give it a default, or compile a module that fills it in"
        )


def check_runs(model: nn.Module, stateless: nn.Module, length: int) -> None:
    """Refuse a model that does not run on `length` token ids alone; `stateless` calls it with ids and positions.

    Raises
    ------
    CaptureError: naming the input that it misses, where the error and the lines that raised it tell.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    positions = torch.arange(length, dtype=torch.int64, device=device)[None]
    try:
        stateless(ids, positions)
    except Exception as error:  # whatever the model's Python raises
        parameters = inspect.signature(model.forward).parameters.values()
        others = [p.name for p in parameters if p.default is None and p.name not in GIVEN | OPTIONS]
        lines = "\n".join([str(error), *(frame.line or "" for frame in traceback.extract_tb(error.__traceback__))])
        missed = [name for name in others if re.search(rf"\b{re.escape(name)}\b", lines)]
        what = f"; it reads {_listed(missed)}, which a program does not take" if missed else ""
        if others and not missed:
            what = f"; perhaps it misses {_listed(others)}, which a program does not take"
        raise CaptureError(
            f"{type(model).__name__} does not run on token ids alone{what}. It raised {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0][:300] if str(error).strip() else 'no message'}"
        ) from error


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
