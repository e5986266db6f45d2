"""Bind a plain PyTorch function to an operator, with a backward that recomputes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from semkv.errors import InputError


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

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        _check(name, inputs)
        ctx.inputs = tuple(None if _tensors(value) else value for value in inputs)
        ctx.sizes = tuple(len(value) if isinstance(value, list) else None for value in inputs)
        ctx.places = tuple(place for place, value in enumerate(inputs) if _tensors(value))
        ctx.keywords = keyword_only_inputs or {}
        ctx.save_for_backward(*(x for place in ctx.places for x in _tensors(inputs[place])))

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        values = list(ctx.inputs)
        saved = iter(ctx.saved_tensors)
        wanted: dict[int, list[Tensor]] = {}
        for place in ctx.places:
            needs = ctx.needs_input_grad[place]
            needs = needs if isinstance(needs, list) else [needs] * (ctx.sizes[place] or 1)
            own = [next(saved).detach().requires_grad_(need and place in differentiable) for need in needs]
            values[place] = own if ctx.sizes[place] is not None else own[0]
            wanted[place] = [x for x in own if x.requires_grad]
        with torch.enable_grad():
            output = function(*values, **ctx.keywords)
            leaves = [x for own in wanted.values() for x in own]
            found = dict(zip(map(id, leaves), torch.autograd.grad(output, leaves, gradient, allow_unused=True)))
        result: list[Any] = [None] * len(values)
        for place in ctx.places:
            parts = [found.get(id(x)) for x in _tensors(values[place])]
            result[place] = parts if ctx.sizes[place] is not None else parts[0]
        return tuple(result[: len(ctx.needs_input_grad)])  # arguments left at their defaults are not among the inputs

    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=library)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors that an argument is: itself, or those of a list, which has nothing else where it is differentiated."""
    if isinstance(value, Tensor):
        return [value]
    return value if isinstance(value, list) and value and all(isinstance(x, Tensor) for x in value) else []


def _check(name: str, inputs: tuple[Any, ...]) -> None:
    mixed = [value for value in inputs if isinstance(value, list) and any(x is None for x in value)]
    if any(isinstance(x, Tensor) and x.requires_grad for value in mixed for x in value):
        raise InputError(
            f"{name}: a list of tensors and None takes no gradient; give a tensor of zeros in place of None"
        )
