"""Which nodes of a graph take a dtype or a device from the defaults of the process that runs it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten

PINNED = ("dtype", "device")
"""Arguments of operators that say what a default says otherwise."""

COMPARISONS = frozenset(getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge"))
"""Of whole numbers with a fraction: both are compared in the default dtype, which the result does not show."""

CONDITIONS = frozenset({"condition", "mask", "index", "indices"})
"""Operands whose numbers are no part of the result."""


def open_arguments(node: Node) -> tuple[str, ...]:
    """The arguments `dtype` and `device` that the node leaves open, where a default decides what they are."""
    declared = places(node)
    missing = tuple(
        name
        for name in PINNED
        if name in declared
        and (node.args[declared[name]] if declared[name] < len(node.args) else node.kwargs.get(name)) is None
    )
    makes_tensor = declared.keys() >= set(PINNED) and not _takes_tensor(node)
    if makes_tensor or not missing:
        return missing
    return ("dtype",) if "dtype" in missing and _becomes_floating(node) else ()


def _takes_tensor(node: Node) -> bool:
    """Whether the operator reads a tensor, by which what it makes is: `zeros_like`, `new_full`."""
    kinds = (str(argument.type) for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return any("Tensor" in kind for kind in kinds)


def places(node: Node) -> dict[str, int]:
    """The place of each argument that an operator of ATen declares, by its name; empty for other nodes."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return {}
    return {argument.name: place for place, argument in enumerate(target._schema.arguments)}


def default_decides(node: Node) -> bool:
    """Whether the default dtype says in what the node computes: it has whole numbers only, and nowhere to say it."""
    declared = places(node)
    if node.target in COMPARISONS:
        value = node.args[1].meta.get("val") if isinstance(node.args[1], Node) else node.args[1]
        return isinstance(value, (float, torch.SymFloat)) and _whole_numbers(node)
    return bool(declared) and "dtype" not in declared and _becomes_floating(node)


def reads_default(node: Node) -> bool:
    """Whether the node computes something else where the default dtype is another one.

    A device that is left open is the CPU under any default, and whole numbers are int64: operators in a graph do not ask for more.
    """
    value = node.meta.get("val")
    floating = not isinstance(value, Tensor) or _floating(value)
    return ("dtype" in open_arguments(node) and floating) or default_decides(node)


def tensor_operands(node: Node) -> list[Node]:
    """The operands that are tensors, or lists of them, as far as the graph knows."""
    return [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor)]


def _becomes_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and _floating(value) and bool(tensor_operands(node)) and _whole_numbers(node)


def _whole_numbers(node: Node) -> bool:
    """Whether all operands are known, and none of the tensors is of floating-point or complex numbers."""
    known = all("val" in operand.meta for operand in node.all_input_nodes)
    return known and not any(_floating(operand.meta["val"]) for operand in tensor_operands(node))


def _floating(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
