"""Which values of a graph depend on a token's place, found by running it at two lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.errors import CaptureError
from semkv.ir.graph import describe, reads_sizes_only
from semkv.ir.local import run_locally

aten = torch.ops.aten

LENGTHS = (7, 11)
"""Two odd lengths at which what depends on sizes alone is evaluated."""


@dataclass(frozen=True)
class Source:
    """A node whose value is to come from `positions`.

    Attributes
    ----------
    node: the node to replace.
    offset: c, where the value at token t is t + c, or the row t + c of `table`.
    axis: the token axis of the value.
    shape: the value's shape at B = 1, with T as -1.
    table: the constant that is sliced; None where the value is the position itself.
    """

    node: Node
    offset: int
    axis: int
    shape: tuple[int, ...]
    table: Node | None = None


def _tensors_differ(short: Any, long: Any) -> bool:
    if isinstance(short, (tuple, list)):
        return len(short) != len(long) or any(map(_tensors_differ, short, long))
    return isinstance(short, Tensor) and not (short.shape == long.shape and torch.equal(short, long))


@dataclass(frozen=True)
class Observed:
    """Values of the nodes that depend on sizes alone, at two lengths and B = 1; None for those that no length changes."""

    short: dict[Node, Any]
    long: dict[Node, Any]

    def follows_length(self, node: Node) -> bool:
        """Whether the node is a tensor, or a list of tensors, that depends on the sequence's length."""
        return node in self.short and _tensors_differ(self.short[node], self.long[node])


def _static_nodes(body: GraphModule) -> dict[Node, bool]:
    """Nodes whose value does not depend on ids or positions, only on parameters and sizes: whether it does on sizes."""
    static: dict[Node, bool] = {}
    for node in body.graph.nodes:
        computed = node.op == "call_function" and all(operand in static for operand in node.all_input_nodes)
        if computed or node.op == "get_attr" or reads_sizes_only(node):
            static[node] = reads_sizes_only(node) or any(static.get(operand) for operand in node.all_input_nodes)
    return static


def observe(body: GraphModule) -> Observed:
    """Values of the nodes of `body` that depend on parameters and sizes alone, at both of `LENGTHS`."""
    static = _static_nodes(body)
    kept = []
    for length in LENGTHS:
        kept.append(_static_values(body, static, length))
    return Observed(*kept)


def _static_values(body: GraphModule, static: dict[Node, bool], length: int) -> dict[Node, Any]:
    kept: dict[Node, Any] = {}

    def keep(node: Node, value: Any) -> Any:
        if node in static:
            # What is made of weights alone, dequantised ones for example, may be as large as the model.
            kept[node] = value if static[node] else None
        return value

    run_locally(body, *example_inputs(body, 1, length), keep)
    return kept


def example_inputs(body: GraphModule, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids (small ones, which every vocabulary has) and positions from 0."""
    device = next((tensor.device for tensor in body.state_dict().values()), torch.device("cpu"))
    generator = torch.Generator(device="cpu").manual_seed(0)
    ids = torch.randint(0, 16, (rows, length), generator=generator, dtype=torch.int64, device="cpu").to(device)
    return ids, torch.arange(length, dtype=torch.int64, device=device).expand(rows, length).contiguous()


def find_sources(body: GraphModule, observed: Observed) -> list[Source]:
    """What must be replaced so that everything computed from it follows the positions."""
    sources: dict[Node, Source] = {}
    for node in find_frontier(body, observed):
        _require_prefix(node, observed)
        _resolve(node, observed, sources)
    return [sources[node] for node in body.graph.nodes if node in sources]


def find_frontier(body: GraphModule, observed: Observed) -> list[Node]:
    """Values per place that meet what is computed from ids.

    Without a token axis there is no place to be read (tokens times experts, for example), and what is the same for all
    tokens need not know it.
    """
    output = body.graph.output_node()
    return [
        node
        for node in body.graph.nodes
        if observed.follows_length(node)
        and any(user not in observed.short or user is output for user in node.users)
        and token_axes(node, observed)
        and not constant_along_tokens(node, observed)
    ]


def token_axes(node: Node, observed: Observed) -> list[int]:
    """The axes of the node's value that are as long as the sequence at both lengths; none where it is no tensor."""
    if not isinstance(observed.short[node], Tensor):
        return []
    short, long = observed.short[node].shape, observed.long[node].shape
    if len(short) != len(long):
        return []
    return [axis for axis, sizes in enumerate(zip(short, long)) if sizes == LENGTHS]


def _prefix(value: Tensor, axes: list[int], length: int) -> Tensor:
    for axis in axes:
        value = value.narrow(axis, 0, length)
    return value


def constant_along_tokens(node: Node, observed: Observed) -> bool:
    """All tokens see the same: a tensor of ones, for example."""
    axes = token_axes(node, observed)
    first_short, first_long = (_prefix(values[node], axes, 1) for values in (observed.short, observed.long))
    if not axes or first_short.shape != first_long.shape or not torch.equal(first_short, first_long):
        return False
    return all(
        bool((values[node] == _prefix(values[node], axes, 1)).all()) for values in (observed.short, observed.long)
    )


def _require_prefix(node: Node, observed: Observed) -> None:
    """A longer sequence must only add to a value that meets the tokens, not change what earlier tokens saw."""
    axes = token_axes(node, observed)
    short, long = observed.short[node], observed.long[node]
    prefix = _prefix(long, axes, LENGTHS[0])
    wide = torch.complex128 if short.is_complex() else torch.float64
    same = prefix.shape == short.shape and torch.allclose(prefix.to(wide), short.to(wide), equal_nan=True)
    if len(axes) != 1 or not same:
        raise CaptureError(
            f"{describe(node)} depends on the sequence length (shape {tuple(short.shape)} at {LENGTHS[0]} tokens) and "
            "is read by the tokens: expected a value per position, or a mask that an attention site takes up. "
            "Give the model a position input, or a form of attention that semkv finds"
        )


def _resolve(node: Node, observed: Observed, sources: dict[Node, Source]) -> None:
    """Record what to replace so that `node` follows the positions."""
    if node in sources:
        return
    source = _position_source(node, observed) or _table_source(node, observed)
    if source is not None:
        sources[node] = source
        return
    operands = [
        o for o in node.all_input_nodes if observed.follows_length(o) and not constant_along_tokens(o, observed)
    ]
    if not operands:
        raise CaptureError(
            f"{describe(node)} makes a value of the sequence's length that is neither position + constant nor rows of "
            f"a table: {str(observed.short[node])[:80]}. Give the model a position input"
        )
    for operand in operands:
        _resolve(operand, observed, sources)


def _position_source(node: Node, observed: Observed) -> Source | None:
    """The node as `position + offset`, its other axes of size 1."""
    axes = token_axes(node, observed)
    short, long = observed.short[node], observed.long[node]
    if len(axes) != 1 or short.numel() != LENGTHS[0] or short.dtype == torch.bool or short.is_complex():
        return None
    offset = short.flatten()[0].item()
    for value, length in zip((short, long), LENGTHS):
        expected = torch.arange(length, dtype=torch.int64, device=value.device).to(value.dtype) + offset
        if not torch.equal(value.flatten(), expected):
            return None
    if offset != int(offset):
        return None
    shape = tuple(-1 if axis == axes[0] else 1 for axis in range(short.dim()))
    return Source(node, int(offset), axes[0], shape)


def _table_source(node: Node, observed: Observed) -> Source | None:
    """The node as a slice of a constant table whose end is the length."""
    if node.target != aten.slice.Tensor:
        return None
    table = node.args[0]
    if not isinstance(table, Node) or table not in observed.short or observed.follows_length(table):
        return None
    axis = node.args[1] if len(node.args) > 1 else 0
    start = node.args[2] if len(node.args) > 2 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    shape = list(observed.short[node].shape)
    axis %= len(shape)
    if step != 1 or not isinstance(start, (int, type(None))) or token_axes(node, observed) != [axis]:
        return None
    shape[axis] = -1
    return Source(node, start or 0, axis, tuple(shape), table)
