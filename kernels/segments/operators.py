"""What stands for each operator of ATen, and for those of semkv: an entry of a table, or a few lines of a function that `emits` it.

Sizes are those of one call, so everything is decided once for them. Tensors without numbers (device `meta`) go through the operator itself
for sizes, dtypes and views, which costs a step nothing: an instruction reads and writes through strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from semkv.ir import ops
from semkv.kernels.calls import OPERATORS
from semkv.kernels.mixed_attention import mixed_attention
from semkv.kernels.segments import elementwise, indices, makers, matrices, reductions
from semkv.kernels.segments.emitting import described
from semkv.kernels.segments.operation import FUNCTIONS, Operation, aten
from semkv.kernels.segments.values import Emitted, Value, expect

TABLES = (elementwise, indices, makers, matrices, reductions)
"""What knows operators: each puts its own into `FUNCTIONS`."""

STAND_FOR: dict[Any, Any] = {mixed_attention: ops.mixed_attention}
"""Operators that functions in a graph stand for."""


def emit(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Emitted:
    """What a call becomes; `args` and `kwargs` with values in place of tensors. Raises `UnsupportedNode`."""
    target = STAND_FOR.get(target, target)
    if target in OPERATORS:
        operation = Operation(target, args, kwargs)
        made = described(operation.emitting, OPERATORS[target], operation.given)
        return _emitted(made, operation)
    expect(isinstance(target, torch._ops.OpOverload) and target.namespace == "aten", f"no instruction for {target}")
    into, functional = None, target
    if target._schema.is_mutable:
        functional, into = _functional(target), args[0]
        expect(functional in FUNCTIONS, f"no instruction for {target}")
    operation = Operation(functional, args, kwargs, into)
    made = FUNCTIONS.get(functional, _view)(operation)
    if into is not None and made is not into:
        operation.emitting.copy(made, into)
        made = into
    return _emitted(made, operation)


def _emitted(made: Any, operation: Operation) -> Emitted:
    return Emitted(made, tuple(operation.emitting.fresh), tuple(operation.emitting.steps))


def _functional(target: Any) -> Any:
    """The operator that computes what `target` writes in place to its first argument."""
    name = target._schema.name.split("::")[1]
    written = [x.name for x in target._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    expect(name.endswith("_") and written == ["self"], f"no instruction for {target}")
    found = getattr(getattr(aten, name[:-1], None), target._overloadname, None)
    expect(found is not None, f"no instruction for {target}")
    return found


def _view(x: Operation) -> Any:
    """A view, by what PyTorch makes of tensors without numbers; a copy where it makes one."""
    one, result = x.args[0] if x.args else None, None
    expect(isinstance(one, Value) and _may_view(x.target), f"no instruction for {x.target}")
    result = x.bare()
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    own = one.meta.untyped_storage()._cdata
    if all(part.untyped_storage()._cdata == own for part in parts):
        views = [x.emitting.view(one, part) for part in parts]
        return views if isinstance(result, (list, tuple)) else views[0]
    same = len(parts) == 1 and parts[0].dtype == one.dtype and parts[0].numel() == one.layout.numel
    expect(same, f"no instruction for {x.target} of {one.shape}")
    out = x.emitting.copied(one)
    return x.emitting.view(out, out.meta.view(parts[0].shape))


def _may_view(target: Any) -> bool:
    if target == aten._unsafe_view.default:
        return True
    alias = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return alias is not None and not alias.is_write


def is_supported(node: Node) -> bool:
    """Whether there may be instructions for a node of a run, by its operator alone: of ATen, and nothing that is written in place."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if target in FUNCTIONS or target == ops.linear:
        return True
    return target.namespace == "aten" and (target == aten.sym_size.int or _may_view(target))


__all__ = ["emit", "is_supported"]
