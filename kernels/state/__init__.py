"""The operators on a memory's tensors (`semkv.ir.state_ops`): sizes never depend on data, and nothing is asked of the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from semkv.ir import ops, state_ops
from semkv.kernels.calls import OPERATORS, Operator
from semkv.kernels.state.append import describe_append
from semkv.kernels.state.choose import describe_choose
from semkv.kernels.state.coarse import describe_coarse
from semkv.kernels.state.factored import describe_factored
from semkv.kernels.state.look_up import describe_look_up
from semkv.kernels.state.products import describe_products
from semkv.kernels.state.reference import (
    append_reference,
    choose_each_reference,
    choose_reference,
    coarse_attention_reference,
    factored_attention_reference,
    look_up_reference,
    products_reference,
    scores_reference,
    unfold_reference,
)
from semkv.kernels.state.scores import describe_scores
from semkv.kernels.state.there import unfold_there
from semkv.kernels.state.unfold import describe_unfold, waits_in_file

REFERENCES: dict[str, Callable[..., Any]] = {
    "append_": append_reference,
    "products": products_reference,
    "look_up": look_up_reference,
    "scores": scores_reference,
    "choose": choose_reference,
    "choose_each": choose_each_reference,
    "unfold_": unfold_reference,
    "coarse_attention": coarse_attention_reference,
    "factored_attention_": factored_attention_reference,
}
"""Each operator in PyTorch."""

IN_CPP: dict[str, Operator] = {
    "append_": Operator(append_reference, describe_append),
    "choose": Operator(choose_reference, describe_choose),
    "choose_each": Operator(choose_each_reference, partial(describe_choose, each=True)),
    "unfold_": Operator(unfold_reference, describe_unfold, waits_in_file),
    "products": Operator(products_reference, describe_products),
    "look_up": Operator(look_up_reference, describe_look_up),
    "scores": Operator(scores_reference, describe_scores),
    "coarse_attention": Operator(coarse_attention_reference, describe_coarse),
    "factored_attention_": Operator(factored_attention_reference, describe_factored),
}
"""Those that have a form in C++ for a CPU."""

for _name, _reference in REFERENCES.items():
    ops.library.impl(_name, IN_CPP.get(_name, _reference), "CPU")
    ops.library.impl(_name, unfold_there if _name == "unfold_" else _reference, "CUDA")
    if _name in IN_CPP:
        OPERATORS[getattr(state_ops, _name)] = IN_CPP[_name]

__all__ = ["IN_CPP", "REFERENCES"]
