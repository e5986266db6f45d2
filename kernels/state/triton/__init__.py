"""The operators of `semkv.ir.state_ops` as kernels in Triton: by operator, what answers a call on the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semkv.ir import state_ops
from semkv.kernels.calls import UnsupportedCall
from semkv.kernels.generation import Launch
from semkv.kernels.state.reference import (
    append_reference,
    choose_each_reference,
    choose_reference,
    coarse_attention_reference,
    look_up_reference,
    products_reference,
    scores_reference,
)
from semkv.kernels.state.there import unfold_there
from semkv.kernels.state.triton.append import append_launches
from semkv.kernels.state.triton.choose import choose_launches
from semkv.kernels.state.triton.coarse import coarse_launches
from semkv.kernels.state.triton.products import look_up_launches, products_launches
from semkv.kernels.state.triton.scores import scores_launches
from semkv.kernels.state.triton.unfold import unfold_launches

Launches = Callable[..., tuple[Any, list[Launch]]]
"""Of an operator's arguments: its result, and what writes it."""


def _choose(*given: Any, **named: Any) -> tuple[Any, list[Launch]]:
    found, launches = choose_launches(*given, **named)
    return found[0], launches


def _choose_each(*given: Any, **named: Any) -> tuple[Any, list[Launch]]:
    found, launches = choose_launches(*given, **named, each=True)
    return found[:2], launches


LAUNCHES: dict[Any, tuple[Launches, Callable[..., Any]]] = {
    state_ops.append_: (append_launches, append_reference),
    state_ops.products: (products_launches, products_reference),
    state_ops.look_up: (look_up_launches, look_up_reference),
    state_ops.scores: (scores_launches, scores_reference),
    state_ops.choose: (_choose, choose_reference),
    state_ops.choose_each: (_choose_each, choose_each_reference),
    state_ops.unfold_: (unfold_launches, unfold_there),
    state_ops.coarse_attention: (coarse_launches, coarse_attention_reference),
}
"""By operator, and what computes where tensors lie in a way that there is no kernel for."""


def launched(launches: Launches, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What runs the launches of a call, or computes otherwise."""

    def call(*given: Any, **named: Any) -> Any:
        try:
            found, todo = launches(*given, **named)
        except UnsupportedCall:
            return otherwise(*given, **named)
        for launch in todo:
            launch.run()
        return found

    return call


FORMS = {operator: launched(*made) for operator, made in LAUNCHES.items()}
"""By operator, what runs it."""

__all__ = ["FORMS", "LAUNCHES", "launched"]
