"""Whether two exports of one model are the same operations at given sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from semkv.capture.guards import Guards
from semkv.capture.sizes import Evaluator, UnknownExpressionError

_aten = torch.ops.aten
UNCHANGING = frozenset(
    {_aten.alias.default, _aten.slice.Tensor, _aten.expand.default, _aten.view.default, _aten.reshape.default}
)
"""Operators that give back what they were given where its shape stays; export writes them in several ways."""

ASSERTIONS = ("aten::_assert", "aten::sym_constrain_range")


def same_operations(left: ExportedProgram, right: ExportedProgram, rows: int, length: int) -> bool:
    """Whether both graphs, symbols replaced by these sizes, call the same operators with the same arguments in the same order.

    A branch that was taken otherwise in the second export and changed no operation decided nothing.
    """
    try:
        mine, theirs = (list(_operations(exported, rows, length)) for exported in (left, right))
    except UnknownExpressionError:
        return False
    return mine == theirs


def _operations(exported: ExportedProgram, rows: int, length: int) -> Iterator[Any]:
    values = Guards(exported).values(rows, length)
    names = {}
    for spec in exported.graph_signature.input_specs:
        constant = exported.constants.get(spec.target) if spec.kind == InputKind.CONSTANT_TENSOR else None
        names[spec.arg.name] = (
            str(constant.tolist()) if isinstance(constant, Tensor) else str(spec.target or spec.arg.name)
        )
    yield from _of_graph(exported.graph_module, values, names)


def _of_graph(module: GraphModule, values: Evaluator, names: dict[str, str]) -> Iterator[Any]:
    """Each operation as text; a tensor is called by the number of the operation that made it."""
    numbers: dict[Node, str] = {}
    made = itertools.count()

    def argument(value: Any) -> Any:
        if isinstance(value, Node):
            return numbers[value] if value in numbers else _number(value.meta["val"], values)
        return value

    for node in module.graph.nodes:
        if _is_assertion(node) or isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            continue
        if node.target in UNCHANGING and _shape(node, values) == _shape(node.args[0], values):
            numbers[node] = numbers[node.args[0]]
            continue
        if node.op == "placeholder":
            number = names.get(node.name, node.name)
        elif node.op == "get_attr":
            inner = getattr(module, str(node.target), None)
            number = str(list(_of_graph(inner, values, {}))) if isinstance(inner, GraphModule) else str(node.target)
        else:
            arguments = map_arg((node.args, node.kwargs), lambda n: _Word(argument(n)))
            yield str(node.target), str(arguments)
            number = f"%{next(made)}"
        numbers[node] = number


def _shape(node: Node, values: Evaluator) -> list[str]:
    return [_number(size, values) for size in node.meta["val"].shape]


class _Word:
    """What stands in the place of a node: printed as it is."""

    def __init__(self, text: Any) -> None:
        self.text = str(text)

    def __repr__(self) -> str:
        return self.text


def _number(value: Any, values: Evaluator) -> str:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = np.asarray(values(value.node.expr)).item()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _is_assertion(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name().startswith(ASSERTIONS)
