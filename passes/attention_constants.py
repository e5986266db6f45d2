"""Constants of an attention: numbers that its mask compares with, its sinks, and the tensors that its bias becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir.graph import attribute
from semkv.passes.attention_operands import PROBE_LENGTH, chain_of
from semkv.passes.attention_probe import Evaluator, Rejected
from semkv.passes.graph_utils import SHAPE_ONLY, emit

aten = torch.ops.aten

SMALL_TENSOR = 16
"""Constants of at most this many numbers are read for bounds of windows; of larger ones, where they change."""


def whole_numbers(evaluator: Evaluator, targets: Iterable[Node], region: frozenset[Node]) -> set[int]:
    """Whole numbers in the computation of a mask: arguments, small constants, distances where a stored mask changes."""
    found: set[int] = set()
    seen: set[Node] = set()
    waiting = list(targets)
    while waiting:
        node = waiting.pop()
        if node in seen or (node in evaluator.tainted and node not in region):
            continue
        seen.add(node)
        if node.op == "get_attr":
            evaluator.read.add(str(node.target))
            found |= _numbers_of_tensor(attribute(evaluator.module, str(node.target)))
        elif node.op == "call_function":
            found |= _numbers_of_arguments((node.args, node.kwargs))
            if node.target not in SHAPE_ONLY:
                waiting.extend(node.all_input_nodes)
    return found


def _numbers_of_arguments(value: Any) -> set[int]:
    if isinstance(value, bool):
        return set()
    if isinstance(value, (int, float)):
        whole = abs(value) < 2**31 and value == int(value)
        return {abs(int(value))} if whole else set()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return set().union(*(_numbers_of_arguments(item) for item in value)) if value else set()
    return set()


def _numbers_of_tensor(value: object) -> set[int]:
    if not isinstance(value, Tensor):
        return set()
    value = value.detach()
    if value.numel() <= SMALL_TENSOR:
        return (
            set().union(*(_numbers_of_arguments(number) for number in value.flatten().tolist()))
            if value.numel()
            else set()
        )
    if value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return set()
    last = value.reshape(-1, value.shape[-2], value.shape[-1])[:, -1]
    changes = (last[:, 1:] != last[:, :-1]).any(0).nonzero().flatten().tolist()
    size = value.shape[-1]
    return {size - 1 - place for place in changes[:SMALL_TENSOR]} | {size - 14}


class AttentionConstants:
    """Registers what biases and sinks become on the module, once per value."""

    def __init__(self, module: GraphModule, evaluator: Evaluator, dtype: torch.dtype, by: str) -> None:
        self.module = module
        self.evaluator = evaluator
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.by = by
        self.made: list[tuple[Tensor, Node]] = []

    def tensor(self, value: Tensor | None) -> Node | None:
        """A node that reads `value`, stored in float32 (float64 for a float64 model) beside the parameters."""
        if value is None:
            return None
        value = value.to(self.dtype).to(next((p.device for p in self.module.parameters()), torch.device("cpu")))
        for known, node in self.made:
            if known.shape == value.shape and torch.equal(known, value):
                return node
        name = f"semkv_bias_{len(self.made)}"
        self.module.register_buffer(name, value)
        node = self._read(name)
        self.made.append((value, node))
        return node

    def sinks(self, node: Node, four: Callable[[Tensor], Tensor]) -> Node:
        """A node of shape [Hq] with the sinks that `node` [..., T|1, 1] brings to every row.

        A parameter that holds exactly them is read as it is, so that it stays the user's.

        Raises
        ------
        Rejected: they differ between tokens or rows, or depend on token ids.
        """
        if node in self.evaluator.tainted:
            raise Rejected("its sinks depend on token values")
        value = four(self.evaluator.run(node, PROBE_LENGTH)).detach()
        if not torch.equal(value, value[:1, :, :1].expand_as(value)):
            raise Rejected("its sinks differ between tokens; expected one number per head")
        sinks = value[0, :, 0, 0]
        source = chain_of(node)[-1]
        while source.target == aten.to.dtype:
            source = chain_of(source.args[0])[-1]
        if source.op == "get_attr":
            stored = attribute(self.module, str(source.target))
            fits = isinstance(stored, Tensor) and stored.numel() == sinks.numel()
            if fits and torch.equal(stored.detach().flatten().cpu().to(sinks.dtype), sinks):
                return self._flat(source, stored)
        return self.tensor(sinks)

    def _flat(self, source: Node, stored: Tensor) -> Node:
        if stored.dim() == 1:
            return source
        with self.module.graph.inserting_after(source):
            return emit(self.module.graph, aten.reshape.default, (source, [stored.numel()]), like=source, by=self.by)

    def _read(self, name: str) -> Node:
        first = next(iter(self.module.graph.nodes))
        with self.module.graph.inserting_before(first):
            node = self.module.graph.get_attr(name)
        mode = self.evaluator.ids.meta["val"].fake_mode
        node.meta["val"] = mode.from_tensor(attribute(self.module, name))
        node.meta["origin"] = f"model: {self.by}"
        return node
