"""Make positions that the model computes for itself functions of the `positions` input.

A model that counts its tokens inside (`arange` over the token axis, a cumulative sum over ones, the first T rows of a
table of cosines) gives every single token the position 0. After this pass, a token run alone at position p gets
what it got inside a long sequence.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from semkv.errors import CaptureError
from semkv.ir.graph import copy_graph_module, describe, finish, placeholders
from semkv.ir.local import RUN_ERRORS, close, run_locally
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions
from semkv.passes.flat_positions import lift_flat
from semkv.passes.position_sources import LENGTHS, Observed, Source, example_inputs, find_sources, observe

aten = torch.ops.aten

Form = Literal["rows", "heads", "flat", "single"]
FORMS: tuple[tuple[Form, Form], ...] = (
    ("rows", "rows"),
    ("rows", "heads"),
    ("heads", "heads"),
    ("heads", "rows"),
    ("flat", "flat"),
    ("single", "single"),
)
"""How a value with a leading token axis [T, ...] follows rows of positions: [B, T, ...], [B, 1, T, ...] (it meets
heads), as one long row that is cut afterwards (see `flat_positions`), or as [T, ...] of the one row that a call may
hold. Tried in order; first for positions, then for tables."""


class LiftPositions(Pass):
    """Values that depend on the token's place in the sequence read it from `positions`."""

    name = "lift_positions"
    needs = "found"
    leaves = "found"
    after = ("find_attention",)

    def run(self, program: Program, options: PassOptions) -> Program:
        """Replace what counts tokens; `batched=False` where only one row's positions fit.

        Raises
        ------
        CaptureError: a value depends on the sequence's length in another way; the message names the node.
        """
        body = finish(copy_graph_module(program.body))
        with torch.no_grad():
            observed = observe(body)
            try:
                sources = find_sources(body, observed)
            except CaptureError:
                if not _agrees(body, body, rows=1):
                    raise
                sources = []
            lifted, forms = _lift_somehow(body, sources, observed)
        if not forms:
            return program.evolve(f"{self.name}: no positions are made inside", body=body)
        listed = ", ".join(f"{describe(source.node)}" for source in sources)
        note = f"{self.name}: {len(sources)} values follow the position input ({' and '.join(forms)}): {listed}"
        return program.evolve(note, body=lifted, batched=program.batched and "single" not in forms)


def _lift_somehow(body: GraphModule, sources: list[Source], observed: Observed) -> tuple[GraphModule, tuple[Form, ...]]:
    """The body with its sources lifted in the first form that agrees, and the form; empty where nothing is lifted.

    Numbers from 0 to T - 1 need not be positions: routers number tokens to bring them back in order. Where no form
    agrees and the body treats tokens by themselves as it is, nothing is lifted; where it does not, the dependence
    analysis will say so.
    """
    if not sources:
        return body, ()
    for forms in FORMS:
        lifted = lift_flat(body, sources, observed) if "flat" in forms else _lift(body, sources, *forms)
        if lifted is not None and _agrees(body, lifted, rows=1 if "single" in forms else 2):
            return lifted, forms
    assert lifted is not None  # the last form always fits
    return (body, ()) if _agrees(body, body, rows=1) else (lifted, forms)


def _lift(body: GraphModule, sources: list[Source], form: Form, table_form: Form) -> GraphModule:
    """A copy of the body in which each source is computed from `positions`."""
    module = copy_graph_module(body)
    graph = module.graph
    by_name = {node.name: node for node in graph.nodes}
    positions = placeholders(graph)["positions"]
    for source in sources:
        node = by_name[source.node.name]
        with graph.inserting_before(node):
            if source.table is None:
                new = _position_value(graph, source, positions, form)
            else:
                new = _table_rows(graph, source, by_name[source.table.name], positions, table_form)
        for created in _between(new, positions):
            created.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))
            created.meta["semkv_pass"] = LiftPositions.name
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    finish(module)
    _refresh_metadata(module)
    return module


def _between(last: Node, first: Node) -> list[Node]:
    """The nodes created after `first`'s placeholder and up to `last` that lead from one to the other."""
    found, waiting = [], [last]
    while waiting:
        node = waiting.pop()
        if node is not first and node.op == "call_function" and "val" not in node.meta:
            found.append(node)
            waiting.extend(node.all_input_nodes)
    return found


def _offset(graph: Graph, positions: Node, offset: int) -> Node:
    return graph.call_function(aten.add.Tensor, (positions, offset)) if offset else positions


def _position_value(graph: Graph, source: Source, positions: Node, form: Form) -> Node:
    """`positions + offset` in the dtype and, up to rows, the shape of the source."""
    dtype = _dtype_of(source.node)
    value = _offset(graph, positions, source.offset)
    if dtype != torch.int64:
        value = graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})
    if form == "single":
        row = graph.call_function(aten.slice.Tensor, (value, 0, 0, 1))
        return graph.call_function(aten.view.default, (row, list(source.shape)))
    for _ in range(max(0, source.axis - 1)):
        value = graph.call_function(aten.unsqueeze.default, (value, 1))
    for _ in range(len(source.shape) - source.axis - 1):
        value = graph.call_function(aten.unsqueeze.default, (value, -1))
    if form == "heads" and source.axis == 0:
        value = graph.call_function(aten.unsqueeze.default, (value, 1))
    return value


def _dtype_of(node: Node) -> torch.dtype:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else torch.int64


def _table_rows(graph: Graph, source: Source, table: Node, positions: Node, form: Form) -> Node:
    """Rows of the source's table at the positions."""
    index = _offset(graph, positions, source.offset)
    if form == "single" or any(size != 1 for size in source.shape[: source.axis]):
        row = graph.call_function(aten.select.int, (index, 0, 0))
        return graph.call_function(aten.index_select.default, (table, source.axis, row))
    for _ in range(source.axis):
        table = graph.call_function(aten.select.int, (table, 0, 0))
    extra = source.axis - 1 if source.axis else int(form == "heads")
    rows = graph.call_function(aten.index.Tensor, (table, [index]))
    for _ in range(extra):
        rows = graph.call_function(aten.unsqueeze.default, (rows, 1))
    return rows


def _refresh_metadata(module: GraphModule) -> None:
    """Shapes of the new nodes and of what is computed from them; a node whose shape cannot be known loses it."""
    mode = getattr(placeholders(module.graph)["positions"].meta.get("val"), "fake_mode", None)
    changed: set[Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or not (
            "val" not in node.meta or any(o in changed for o in node.all_input_nodes)
        ):
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        before = node.meta.pop("val", None)
        after = None if mode is None else _fake_value(module, node, mode)
        if after is not None:
            node.meta["val"] = after
        if not (isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape):
            changed.add(node)


def _fake_value(module: GraphModule, node: Node, mode) -> Any:
    def value(operand: Node) -> Any:
        if "val" in operand.meta:
            return operand.meta["val"]
        raise KeyError(operand.name)

    try:
        args, kwargs = torch.fx.map_arg(node.args, value), torch.fx.map_arg(node.kwargs, value)
        with mode:
            return node.target(*args, **kwargs)
    except Exception:  # a shape that needs real sizes: metadata is a convenience, the numbers are checked by running
        return None


def _agrees(body: GraphModule, lifted: GraphModule, rows: int) -> bool:
    """Whether pieces of sequences, each row at its own positions, give what the body gives inside the whole ones."""
    short, long = LENGTHS
    ids, positions = example_inputs(body, rows, long)
    starts = (2, 0)[:rows]  # neither piece ends where its sequence ends
    pieces = torch.stack([ids[row, start : start + short] for row, start in enumerate(starts)])
    places = torch.stack([positions[row, start : start + short] for row, start in enumerate(starts)])
    try:
        whole = run_locally(body, ids, positions)
        part = run_locally(lifted, pieces, places)
    except RUN_ERRORS:
        return False
    return close(part, torch.stack([whole[row, start : start + short] for row, start in enumerate(starts)]))
