"""One call of an operator of ATen, and the functions that know what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from semkv.kernels.segments.emitting import Emitting
from semkv.kernels.segments.values import Value, expect

aten = torch.ops.aten


def overloads(name: str, kinds: str) -> list[Any]:
    """Those of an operator of ATen that there are, by their names."""
    packet = getattr(aten, name)
    return [getattr(packet, kind) for kind in kinds.split() if kind in packet.overloads()]


class Operation:
    """One call of an operator: `args` and `kwargs` with values in place of tensors.

    into: what it writes to in place. Its functional form is `target` then.
    """

    def __init__(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], into: Value | None = None) -> None:
        self.target, self.args, self.kwargs, self.into = target, args, kwargs, into
        self.emitting = Emitting()
        names = [x.name for x in target._schema.arguments]
        self.given = {
            **{x.name: x.default_value for x in target._schema.arguments if x.has_default_value()},
            **dict(zip(names, args)),
            **kwargs,
        }

    def bare(self) -> Any:
        """What the operator makes of tensors without numbers."""
        kwargs = {name: bare(x) for name, x in self.kwargs.items()}
        if "device" in kwargs:
            expect(torch.device(kwargs["device"] or "cpu").type == "cpu", f"a tensor on {kwargs['device']}")
        if "device" in self.given:
            kwargs["device"] = "meta"
        return self.target(*(bare(x) for x in self.args), **kwargs)

    def out(self) -> Value:
        """Where its one tensor goes: a new one, or what it writes to."""
        made = self.bare()
        return self.emitting.new(made.shape, made.dtype) if self.into is None else self.into

    def base(self, x: Value) -> Value:
        """What it changes a part of: a copy of x, or what it writes to."""
        return self.emitting.copied(x) if self.into is None else self.into


Emit = Callable[[Operation], Any]
FUNCTIONS: dict[Any, Emit] = {}


def emits(*targets: Any) -> Callable[[Emit], Emit]:
    """The function emits these operators; returns their value."""

    def known(function: Emit) -> Emit:
        FUNCTIONS.update(dict.fromkeys(targets, function))
        return function

    return known


def bare(x: Any) -> Any:
    """An argument with tensors without numbers."""
    if isinstance(x, Value):
        return x.meta
    return [bare(part) for part in x] if isinstance(x, (list, tuple)) else x


__all__ = ["FUNCTIONS", "Operation", "aten", "bare", "emits", "overloads"]
