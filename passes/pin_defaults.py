"""Say in the graph what the defaults of the process said when it was captured: dtypes and devices."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from semkv.errors import CaptureError
from semkv.ir.defaults import COMPARISONS, CONDITIONS, default_decides, open_arguments, places
from semkv.ir.graph import copy_graph_module, describe, finish
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import emit, fake_value, replace_node

aten = torch.ops.aten


class PinDefaults(Pass):
    """No node takes a dtype or a device from the defaults of the process that runs it: a graph computes the same in all."""

    name = "pin_defaults"
    needs = "captured"
    leaves = "captured"
    after = ("canonicalise",)

    def run(self, program: Program, options: PassOptions) -> Program:
        """The program whose nodes name the dtype and device that their results had at capture.

        Raises
        ------
        CaptureError: a node computes in the default dtype and cannot be told another way.
        """
        module = copy_graph_module(program.body)
        named, converted = pin(module)
        if not named + converted:
            return program
        finish(module)
        note = f"{self.name}: {named} dtypes and devices named, {converted} operations on whole numbers converted first"
        return program.evolve(note, body=module)


def pin(module: GraphModule) -> tuple[int, int]:
    """Name the defaults in place: how many nodes got names, and of how many the inputs were converted."""
    named = converted = 0
    for node in list(module.graph.nodes):
        if names := open_arguments(node):
            _name(node, names)
            named += 1
        elif default_decides(node):
            _convert(node)
            converted += 1
    return named, converted


def _name(node: Node, names: tuple[str, ...]) -> None:
    """Give the node the arguments `names` as its result has them."""
    value = node.meta["val"]
    declared = places(node)
    for name in names:
        if declared[name] < len(node.args):
            node.update_arg(declared[name], getattr(value, name))
        else:
            node.update_kwarg(name, getattr(value, name))


def _convert(node: Node) -> None:
    """Let the node read its whole numbers in the dtype of its result."""
    dtype = torch.float32 if node.target in COMPARISONS else node.meta["val"].dtype
    with node.graph.inserting_before(node):
        if node.target in (aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther):
            condition, *numbers = node.args
            sides = [_in_dtype(x, dtype, node) for x in numbers]
            replace_node(node, emit(node.graph, aten.where.self, (condition, *sides), like=node, by=PinDefaults.name))
            return
        declared = list(places(node))
        for place, argument in enumerate(node.args):
            if declared[place] not in CONDITIONS and _is_tensor(argument):
                node.update_arg(place, _in_dtype(argument, dtype, node))
        for name, argument in node.kwargs.items():
            if name not in CONDITIONS and _is_tensor(argument):
                node.update_kwarg(name, _in_dtype(argument, dtype, node))
    if default_decides(node) or fake_value(node).dtype != node.meta["val"].dtype:
        raise CaptureError(
            f"{describe(node)} computes in the default dtype of the process, whatever it reads; convert its inputs in the model"
        )


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, Node) and isinstance(argument.meta.get("val"), torch.Tensor)


def _in_dtype(x: Any, dtype: torch.dtype, node: Node) -> Node:
    """A tensor, or a number as a tensor of no dims, in `dtype`."""
    if _is_tensor(x):
        return emit(node.graph, aten.to.dtype, (x, dtype), like=node, by=PinDefaults.name)
    options = {"dtype": dtype, "device": node.meta["val"].device}
    return emit(node.graph, aten.scalar_tensor.default, (x,), options, like=node, by=PinDefaults.name)
