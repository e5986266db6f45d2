"""Bind a plain PyTorch function to an operator, with a backward that recomputes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def register(
    library: torch.library.Library, name: str, function: Callable[..., Tensor], differentiable: Sequence[int]
) -> None:
    """Make `function` the implementation of `semkv::name` on CPU and CUDA, and differentiate it by running it again.

    `differentiable` are the positional arguments that may need gradients. The backward keeps the inputs only: memory is
    what the forward's arguments take, and the score matrix never outlives a call.
    """
    qualified = f"semkv::{name}"
    for key in ("CPU", "CUDA"):
        library.impl(name, function, key)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
        ctx.inputs = tuple(None if isinstance(value, Tensor) else value for value in inputs)
        ctx.places = tuple(place for place, value in enumerate(inputs) if isinstance(value, Tensor))
        ctx.keywords = keyword_only_inputs
        ctx.save_for_backward(*(inputs[place] for place in ctx.places))

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values = list(ctx.inputs)
        wanted: list[int] = []
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            needs = place in differentiable and ctx.needs_input_grad[place]
            values[place] = tensor.detach().requires_grad_(needs)
            if needs:
                wanted.append(place)
        with torch.enable_grad():
            output = function(*values, **ctx.keywords)
            gradients = torch.autograd.grad(output, [values[place] for place in wanted], gradient, allow_unused=True)
        result: list[Tensor | None] = [None] * len(values)
        for place, value in zip(wanted, gradients, strict=True):
            result[place] = value
        return tuple(result)

    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=library)
