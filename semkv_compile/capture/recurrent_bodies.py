"""What a recurrent module computes, as graphs of tensor operators: of one token of any number of rows, and of several of one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from semkv.capture.recurrent_sites import Site
from semkv.errors import CaptureError
from semkv.ir.graph import finish
from semkv.ir.recurrence import Pieces
from semkv.ir.spec import FORBIDDEN_NAMES, PLAIN_FUNCTIONS
from semkv.passes.pin_defaults import pin

aten = torch.ops.aten
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
ROWS = 3
"""Rows of the example that is traced over one token; the graph is for any number."""


def trace_pieces(site: Site, tokens: Sequence[int], *, first: bool) -> Pieces:
    """The graphs of a site's body for each number of `tokens`. first: whether one token that follows none is a computation of its own.

    Raises
    ------
    CaptureError: its code branches on values, or on the number of rows.
    """
    graphs = {count: _trace(site, count, fresh=False) for count in tokens}
    return Pieces(graphs, _trace(site, 1, fresh=True) if first else None, site.states, site.outputs)


def _trace(site: Site, count: int, *, fresh: bool) -> GraphModule:
    rows = ROWS if count == 1 else 1
    mode = FakeTensorMode(shape_env=ShapeEnv() if rows > 1 else None, allow_non_fake_inputs=True)
    device = next(iter(site.weights.values())).device if site.weights else torch.device("cpu")
    read = len(site.places)

    def example(shape: Sequence[int], dtype: torch.dtype, of_rows: bool, number: int) -> Tensor:
        real = torch.empty(tuple(shape), dtype=dtype, device=device)
        if rows == 1:
            return mode.from_tensor(real)
        dynamic = [DimDynamic.DUCK if of_rows and axis == 0 else DimDynamic.STATIC for axis in range(len(shape))]
        return mode.from_tensor(
            real,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
            source=ConstantSource(f"input_{number}"),
        )

    shapes = [((rows, count, *form.shape), form.dtype, True) for form in site.inputs]
    shapes += [((rows, *form.shape), form.dtype, True) for form in site.states]
    shapes += [(tuple(x.shape), x.dtype, False) for x in site.weights.values()]
    examples = [example(*each, number) for number, each in enumerate(shapes)]

    def run(*given: Tensor) -> list[Tensor]:
        states, weights = given[read : read + len(site.states)], given[read + len(site.states) :]
        outputs, after = site.run(given[:read], None if fresh else states, dict(zip(site.weights, weights)))
        return [*outputs, *after]

    try:
        with torch.no_grad():
            # What is put into decode must not write in place, where nodes may change their places.
            function, sizes = (dispatch_functionalize(run), "symbolic") if count == 1 else (run, "real")
            module = make_fx(function, tracing_mode=sizes, _allow_non_fake_inputs=True)(*examples)
    except CaptureError:
        raise
    except Exception as error:  # tracing raises whatever the model's Python raises
        raise CaptureError(
            f"{site.name} ({type(site.module).__name__}) cannot be captured over {count} tokens: {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0][:300]}"
        ) from error
    plain = in_plain_operators(module, f"{site.name}: its graph over {count} tokens")
    if count == 1:
        _check_rows(plain.graph, site)
    return plain


def in_plain_operators(module: GraphModule, name: str) -> GraphModule:
    """A traced graph in plain operators, its inputs by number. name: of it, for people.

    Raises
    ------
    CaptureError: it calls what is no operator of tensors.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif _asserts(node):
            graph.erase_node(node)  # of what the model's code makes itself, on which the model would fail
    for node in [x for x in graph.nodes if x.target in (aten.mm.default, aten.addmm.default)]:
        _as_linear(node)
    for node in graph.nodes:
        if node.target in VIEWS:
            node.target = aten.reshape.default  # inputs may be parts of others
    graph.eliminate_dead_code()
    for number, node in enumerate(x for x in graph.nodes if x.op == "placeholder"):
        node.name = node.target = f"input_{number}"
    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta = {"val": value} if isinstance(value, Tensor) else {}
        if node.op == "call_function" and not (
            isinstance(node.target, torch._ops.OpOverload) or node.target in PLAIN_FUNCTIONS
        ):
            raise CaptureError(f"{name} calls {node.target}, which is no operator of tensors")
    pin(module)
    return finish(GraphModule(module, graph, class_name="Body"))


def _asserts(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name().startswith(FORBIDDEN_NAMES)


def _as_linear(node: Node) -> None:
    """`linear` for a product with a transposed weight, the form in which programs have projections, of all tokens as they are."""
    if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return
    *bias, flat, turned = node.args
    if not isinstance(turned, Node) or turned.target != aten.t.default or turned.args[0].op != "placeholder":
        return
    node.target, node.args = aten.linear.default, (flat, turned.args[0], *bias)
    source = flat.args[0] if flat.target in VIEWS else None
    if source is None or source.meta["val"].shape[-1] != flat.meta["val"].shape[-1]:
        return
    shape = (*source.meta["val"].shape[:-1], node.meta["val"].shape[-1])
    users = list(node.users)
    if all(user.target in VIEWS and tuple(user.meta["val"].shape) == shape for user in users):
        node.args = (source, *node.args[1:])
        node.meta = dict(users[0].meta)
        for user in users:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)


def _check_rows(graph: Graph, site: Site) -> None:
    """Raise `CaptureError` where the number of rows of the example became a constant."""
    (results,) = graph.output_node().args
    if not all(isinstance(node.meta["val"].shape[0], torch.SymInt) for node in results):
        raise CaptureError(
            f"{site.name} ({type(site.module).__name__}) branches on the number of rows; expected code for any"
        )


def same_graphs(left: GraphModule, right: GraphModule) -> bool:
    """Whether two graphs call the same operators with the same arguments, and hold equal constants."""
    mine, theirs = list(left.graph.nodes), list(right.graph.nodes)
    if len(mine) != len(theirs):
        return False
    places = dict(zip(mine, theirs))
    for a, b in zip(mine, theirs):
        if a.op == b.op == "get_attr":
            one, other = getattr(left, str(a.target)), getattr(right, str(b.target))
            if not (isinstance(one, Tensor) and isinstance(other, Tensor) and _equal(one, other)):
                return False
            continue
        if (a.op, a.target) != (b.op, b.target):
            return False
        if repr(torch.fx.map_arg((a.args, a.kwargs), lambda x: _Named(places[x].name))) != repr(
            torch.fx.map_arg((b.args, b.kwargs), lambda x: _Named(x.name))
        ):
            return False
    return True


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


class _Named:
    """What stands in the place of a node: printed as its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def same_pieces(left: Pieces, right: Pieces) -> bool:
    """Whether two bodies are the same computation of their tensors, states and weights."""
    mine, theirs = left.modules_by_name(), right.modules_by_name()
    forms = (left.states, left.outputs) == (right.states, right.outputs)
    return forms and mine.keys() == theirs.keys() and all(same_graphs(mine[name], theirs[name]) for name in mine)


__all__ = ["in_plain_operators", "same_pieces", "trace_pieces"]
