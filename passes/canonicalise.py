"""One spelling for one meaning: plain ATen without guards, wrappers and no-ops, equal subexpressions once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from semkv.errors import CaptureError
from semkv.ir.graph import attribute, copy_graph_module, describe, finish, module_path, shape_of
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions
from semkv.passes.contractions import expand_baddbmm, expand_einsum
from semkv.passes.graph_utils import argument, emit, replace_node, same_shape

aten = torch.ops.aten

GUARDS = (
    "aten::_assert",
    "aten::sym_constrain_range",
    "aten::_functional_assert",
    "aten::_functional_sym_constrain_range",
)

IDENTITIES = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.detach_.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
        aten.positive.default,
        aten.resolve_conj.default,
        aten.resolve_neg.default,
    }
)
"""What returns its argument's values. Strides do not matter: every `view` becomes a `reshape`."""

DROPOUTS = frozenset({aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default})
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.view_copy.default, aten._reshape_copy.default})
COPIES = {
    aten.expand_copy.default: aten.expand.default,
    aten.permute_copy.default: aten.permute.default,
    aten.transpose_copy.int: aten.transpose.int,
    aten.unsqueeze_copy.default: aten.unsqueeze.default,
    aten.squeeze_copy.dim: aten.squeeze.dim,
    aten.slice_copy.Tensor: aten.slice.Tensor,
    aten.select_copy.int: aten.select.int,
}
CASTS = frozenset(
    {
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten._to_copy.default,
        aten.type_as.default,
    }
)
END = 2**63 - 1


class Canonicalise(Pass):
    """Remove what only tracing needs; the program's values are exactly those of the captured graph."""

    name = "canonicalise"
    needs = "captured"
    leaves = "captured"

    def run(self, program: Program, options: PassOptions) -> Program:
        """The program with a canonical body.

        Raises
        ------
        CaptureError: a region under enabled autocast, or a control-flow operator.
        """
        module = copy_graph_module(program.body)
        before = _operations(module)
        for node in module.graph.nodes:
            node.meta.setdefault("origin", f"{module_path(node) or 'model'}: capture")
        _inline_regions(module)
        _erase_guards(module)
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                _simplify(node)
        merged = _merge_equal(module)
        finish(module)
        note = f"canonicalise: {before} operations became {_operations(module)}, {merged} equal subexpressions merged"
        return program.evolve(note, body=module)


def _operations(module: GraphModule) -> int:
    return sum(node.op == "call_function" for node in module.graph.nodes)


def _inline_regions(module: GraphModule) -> None:
    """Put the graphs of `wrap_with_set_grad_enabled` and disabled `wrap_with_autocast` in the place of their calls."""
    again = True
    while again:
        again = False
        for node in list(module.graph.nodes):
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                _inline(module, node)
                again = True


def _inline(module: GraphModule, node: Node) -> None:
    kind = node.target.name()
    if kind == "wrap_with_set_grad_enabled":
        region, operands = node.args[1], node.args[2:]
    elif kind == "wrap_with_autocast":
        enabled = node.args[2]
        if enabled:
            raise CaptureError(
                f"{describe(node)}: a region under torch.autocast casts where the graph does not show it; "
                "run the model in the dtype that is wanted instead"
            )
        region, operands = node.args[4], node.args[5:]
    else:
        raise CaptureError(
            f"{describe(node)}: control flow ({kind}) cannot be analysed; expected a forward without cond, map or scan"
        )
    inner = attribute(module, str(region.target))
    assert isinstance(inner, GraphModule)
    sources = [n for n in inner.graph.nodes if n.op == "placeholder"]
    copied: dict[Node, Any] = dict(zip(sources, operands))
    with module.graph.inserting_before(node):
        for member in inner.graph.nodes:
            if member.op == "output":
                results = map_arg(member.args[0], copied.__getitem__)
            elif member.op == "get_attr":
                name = f"{region.target}_{str(member.target).replace('.', '_')}"
                setattr(module, name, attribute(inner, str(member.target)))
                copied[member] = module.graph.get_attr(name)
                copied[member].meta = dict(member.meta)
            elif member.op != "placeholder":
                copied[member] = module.graph.node_copy(member, copied.__getitem__)
                copied[member].meta["origin"] = f"{module_path(member) or 'model'}: {Canonicalise.name}"
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            replace_node(user, results[user.args[1]])  # every user is a getitem
    module.graph.erase_node(node)
    if not region.users:
        module.graph.erase_node(region)


def _erase_guards(module: GraphModule) -> None:
    for node in reversed(list(module.graph.nodes)):
        is_guard = isinstance(node.target, torch._ops.OpOverload) and node.target.name().startswith(GUARDS)
        if node.op == "call_module" and "_guards_fn" in str(node.target):
            is_guard = True
        if is_guard:
            if node.users:
                node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _simplify(node: Node) -> None:
    """Replace one node by its canonical spelling, or by its argument where it does nothing."""
    target = node.target
    if target in IDENTITIES or (target in DROPOUTS and not argument(node, "train")):
        replace_node(node, node.args[0])
        return
    if target in CASTS:
        _simplify_cast(node)
        return
    if target == aten.cat.default:
        _simplify_cat(node)
        return
    if target in VIEWS:
        node.target = target = aten.reshape.default
    elif target in COPIES:
        node.target = target = COPIES[target]
    if target == aten.baddbmm.default:
        replace_node(node, expand_baddbmm(node, Canonicalise.name))
    elif target == aten.einsum.default:
        expanded = expand_einsum(node, Canonicalise.name)
        if expanded is not None:
            replace_node(node, expanded)
    elif _does_nothing(node):
        replace_node(node, node.args[0])


def _simplify_cast(node: Node) -> None:
    """Every conversion is `to.dtype`; moves between devices stay as they are."""
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.device != result.device:
        return
    if source.dtype == result.dtype:
        replace_node(node, node.args[0])
    elif node.target != aten.to.dtype or len(node.args) != 2 or node.kwargs:
        with node.graph.inserting_before(node):
            cast = emit(node.graph, aten.to.dtype, (node.args[0], result.dtype), like=node, by=Canonicalise.name)
        replace_node(node, cast)


def _simplify_cat(node: Node) -> None:
    """Leave out operands that hold nothing, of shape [0], as those that an empty cache brings."""
    result = node.meta.get("val")
    held = [x for x in node.args[0] if not _is_empty(shape_of(x))]
    if not held or not isinstance(result, Tensor) or any(x.meta["val"].dtype != result.dtype for x in held):
        return
    node.update_arg(0, held)
    if len(held) == 1:
        replace_node(node, held[0])


def _is_empty(shape: tuple | None) -> bool:
    return shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


def _does_nothing(node: Node) -> bool:
    target = node.target
    if target in (aten.expand.default, aten.reshape.default, aten.expand_as.default):
        return same_shape(node, node.args[0])
    if target == aten.slice.Tensor:
        start, end, step = argument(node, "start"), argument(node, "end"), argument(node, "step", 1)
        whole = start in (None, 0) and (end is None or (isinstance(end, int) and end >= END)) and step == 1
        return whole or (start in (None, 0) and step == 1 and same_shape(node, node.args[0]))
    if target in (aten.add.Tensor, aten.sub.Tensor) and isinstance(node.args[0], Node):
        value = node.args[0].meta.get("val")
        zero = len(node.args) > 1 and isinstance(node.args[1], int) and node.args[1] == 0
        return zero and isinstance(value, Tensor) and not value.is_floating_point() and same_shape(node, node.args[0])
    return False


def _merge_equal(module: GraphModule) -> int:
    """Let every value that is computed twice be computed once; how many nodes went.

    Layers that share keys and values then read the same nodes.
    """
    seen: dict[Hashable, Node] = {}
    merged = 0
    for node in list(module.graph.nodes):
        key = _key(module, node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            replace_node(node, first)
            merged += 1
    return merged


def _key(module: GraphModule, node: Node) -> Hashable | None:
    if node.op == "get_attr":
        value = attribute(module, str(node.target))
        return ("get_attr", id(value)) if isinstance(value, Tensor) else None
    if node.op != "call_function" or node.is_impure():
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
    ):
        return None
    key = (target, _frozen(node.args), _frozen(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    """A hashable twin of an argument in which 1, 1.0 and True differ."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((name, _frozen(item)) for name, item in value.items()))
    if isinstance(value, slice):
        return ("slice", _frozen((value.start, value.stop, value.step)))
    if isinstance(value, Node):
        return value
    return (type(value), repr(value))
