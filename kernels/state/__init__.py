"""The operators on a memory's tensors (`semkv.ir.state_ops`): sizes never depend on data, and nothing is asked of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semkv.ir import ops, state_ops
from semkv.kernels.state.reference import (
    append_reference,
    choose_each_reference,
    choose_reference,
    coarse_attention_reference,
    look_up_reference,
    products_reference,
    scores_reference,
    unfold_reference,
)

REFERENCES: dict[str, Callable[..., Any]] = {
    "append_": append_reference,
    "products": products_reference,
    "look_up": look_up_reference,
    "scores": scores_reference,
    "choose": choose_reference,
    "choose_each": choose_each_reference,
    "unfold_": unfold_reference,
    "coarse_attention": coarse_attention_reference,
}
"""Each operator in PyTorch."""

for _name, _function in REFERENCES.items():
    assert hasattr(state_ops, _name)
    for _key in ("CPU", "CUDA"):
        ops.library.impl(_name, _function, _key)

__all__ = ["REFERENCES"]
