"""torch.fx graphs as JSON, and back: data in, checked, then built. The form is `semkv.artifact.schema.GraphJson`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen

from semkv.artifact.arguments import DTYPE_NAME, check_call, decode, encode
from semkv.artifact.operators import ARITY, KINDS, resolve, target_name
from semkv.artifact.schema import GRAPH_SCHEMA, GraphJson, NodeJson, attribute_path, identifier
from semkv.errors import ArtifactError
from semkv.io.files import validate
from semkv.ir.memory import GRAPH_FUNCTIONS
from semkv.ir.recurrence import Pieces, distinct_pieces, held_pieces

_RESERVED = frozenset(dir(GraphModule)) | frozenset(vars(torch.nn.Module()))


def graph_tensors(module: GraphModule) -> dict[str, Tensor]:
    """The tensors that the graph's get_attr nodes read, by path, in order of first use."""
    tensors: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target not in tensors:
            value: Any = module
            for part in node.target.split("."):
                value = getattr(value, part, None)
            if isinstance(value, Pieces):
                continue
            if not isinstance(value, Tensor):
                raise ArtifactError(
                    f"node {node.name!r} reads {node.target!r}, a {type(value).__name__}; an artifact holds tensors "
                    "only, so inline submodules first (the canonicalise pass does)"
                )
            tensors[node.target] = value
    return tensors


def graph_device(module: GraphModule) -> torch.device:
    """The device of the graph's tensors; the CPU where it has none. `ArtifactError` where they are on several."""
    devices = {tensor.device for tensor in graph_tensors(module).values()}
    if len(devices) > 1:
        raise ArtifactError(f"a graph's tensors are on {sorted(map(str, devices))}; move the model to one device")
    return devices.pop() if devices else torch.device("cpu")


def graph_to_json(
    module: GraphModule,
    keys: Mapping[str, str] | None = None,
    *,
    meta: bool = True,
    bodies: Sequence[Pieces] | None = None,
) -> dict[str, Any]:
    """The JSON form of a graph.

    Parameters
    ----------
    keys: for each get_attr path the key under which its tensor is stored; default: the path itself.
    bodies: of recurrent sites, which the form names by their places; default: the graph's own.
    meta: whether shapes and dtypes seen at capture are kept for readers.

    Raises
    ------
    ArtifactError: a node, target or argument that the form cannot hold, by the node's name.
    """
    tensors = graph_tensors(module)
    device = graph_device(module)
    nodes = []
    for node in module.graph.nodes:
        try:
            nodes.append(_node_to_json(node, device, module.graph) | (_meta(node) if meta else {}))
        except ArtifactError as cause:
            raise ArtifactError(f"node {node.name!r}: {cause}") from cause
    value = {
        "schema": GRAPH_SCHEMA,
        "nodes": nodes,
        "tensors": {path: (keys or {}).get(path, path) for path in tensors},
    }
    if held := held_pieces(module):
        numbered = distinct_pieces([module]) if bodies is None else bodies
        value["recurrences"] = {
            path: next(number for number, body in enumerate(numbered) if body is own) for path, own in held.items()
        }
    validate(GraphJson, value, "graph", error=ArtifactError)
    return value


def graph_from_json(
    value: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: str | torch.device = "cpu",
    name: str = "graph",
    bodies: Sequence[Pieces] = (),
) -> GraphModule:
    """Build the graph that a JSON form describes, after checking all of it.

    Parameters
    ----------
    value: parsed JSON, from anywhere.
    tensors: stored tensors by key, on `device`; the module holds them by reference under the graph's paths.
    device: what the form calls `model`.
    name: of the graph, for messages.
    bodies: of recurrent sites, by their numbers.

    Raises
    ------
    ArtifactError: any field that is not as docs/artifact.md says: unknown operators, wrong arguments, references
        forward, missing tensors.
    """
    checked = validate(GraphJson, value, name, error=ArtifactError)
    device = torch.device(device)
    graph = Graph()
    nodes: dict[str, Node] = {}
    for index, item in enumerate(checked.nodes):
        try:
            if item.name in nodes:
                raise ArtifactError("its name is taken by an earlier node; the file was edited")
            if (item.op == "output") != (index == len(checked.nodes) - 1):
                raise ArtifactError("expected one output node, at the end; the file was edited")
            nodes[item.name] = _add_node(graph, item, nodes, {*checked.tensors, *checked.recurrences}, device)
        except ArtifactError as cause:
            raise ArtifactError(f"{name}: node {item.name!r}: {cause}") from cause
    root = _attributes(checked.tensors, tensors, name)
    for path, number in checked.recurrences.items():
        if path in _RESERVED or hasattr(root, path) or not 0 <= number < len(bodies):
            raise ArtifactError(
                f"{name}: {path[:80]!r} is recurrence {number} of {len(bodies)}, or a name that is taken; the file was edited"
            )
        setattr(root, path, bodies[number])
    return GraphModule(root, graph)


def _node_to_json(node: Node, device: torch.device, graph: Graph) -> dict[str, Any]:
    if node.op == "placeholder":
        return {"name": node.name, "op": "placeholder", "target": _placeholder_name(node)}
    if node.op == "get_attr":
        return {"name": node.name, "op": "get_attr", "target": str(node.target)}
    if node.op == "output":
        return {"name": node.name, "op": "output", "args": [encode(_returned(node, graph), device)]}
    if node.op != "call_function":
        raise ArtifactError(
            f"{node.op} of {node.target!r}; an artifact holds operators only, so run canonicalise first"
        )
    return {
        "name": node.name,
        "op": "call",
        "target": target_name(node.target),
        "args": [encode(argument, device) for argument in node.args],
        "kwargs": {key: encode(argument, device) for key, argument in node.kwargs.items()},
    }


def _placeholder_name(node: Node) -> str:
    if node.args:
        raise ArtifactError("a placeholder with a default value; give every input")
    try:
        return identifier(str(node.target))
    except ValueError as cause:
        raise ArtifactError(f"placeholder {node.target!r}: {cause}") from cause


def _returned(node: Node, graph: Graph) -> Any:
    """What the graph's forward returns: an exported graph's output is flat, and its code rebuilds the structure."""
    (value,) = node.args
    codegen = graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        spec = codegen.pytree_info.out_spec
        if spec is None or spec.type in (tuple, list):
            return value
        if spec.is_leaf() and isinstance(value, (tuple, list)) and len(value) == 1:
            return value[0]
        raise ArtifactError(f"the graph returns {spec}, expected a tensor or a tuple of tensors; return those")
    return value


def _meta(node: Node) -> dict[str, Any]:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in DTYPE_NAME:
        return {}
    shape = [size if isinstance(size, int) else str(size)[:200] for size in value.shape]
    return {"shape": shape, "dtype": DTYPE_NAME[value.dtype]}


def _add_node(
    graph: Graph, item: NodeJson, nodes: Mapping[str, Node], held: Collection[str], device: torch.device
) -> Node:
    """Check one node and append it."""
    if item.op == "output":
        if item.target is not None or len(item.args) != 1 or item.kwargs:
            raise ArtifactError("an output has one argument and no target; the file was edited")
        return graph.output(decode(item.args[0], nodes, device))
    if item.target is None:
        raise ArtifactError(f"a {item.op} without target; the file was edited")
    if item.op == "call":
        return _add_call(graph, item, nodes, device)
    if item.args or item.kwargs:
        raise ArtifactError(f"a {item.op} takes no arguments; the file was edited")
    if item.op == "get_attr":
        if item.target not in held:
            raise ArtifactError(
                f"it reads {item.target!r}, which is not among the graph's tensors; the file was edited"
            )
        return graph.create_node("get_attr", item.target, name=item.name)
    if any(node.op == "call_function" for node in nodes.values()):
        raise ArtifactError("placeholders come before calls; the file was edited")
    if any(node.op == "placeholder" and node.target == item.target for node in nodes.values()):
        raise ArtifactError(f"a second placeholder {item.target!r}; the file was edited")
    try:
        return graph.create_node("placeholder", identifier(item.target), name=item.name)
    except ValueError as cause:
        raise ArtifactError(f"placeholder {item.target[:80]!r}: {cause}") from cause


def _add_call(graph: Graph, item: NodeJson, nodes: Mapping[str, Node], device: torch.device) -> Node:
    target = resolve(item.target or "")
    args = tuple(decode(argument, nodes, device) for argument in item.args)
    kwargs = {key: decode(argument, nodes, device) for key, argument in item.kwargs.items()}
    if isinstance(target, OpOverload):
        problem = check_call(target._schema, args, kwargs)
    else:
        problem = _check_function(item.target or "", target, args, kwargs)
    if problem is not None:
        raise ArtifactError(f"call of {item.target}: {problem}; the file was edited or comes from another torch")
    return graph.create_node("call_function", target, args, kwargs, name=item.name)


def _check_function(name: str, function: Callable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    if kwargs or len(args) != ARITY[name]:
        return f"{len(args)} positional and {len(kwargs)} named arguments, expected {ARITY[name]} and none"
    if name in KINDS:
        return _check_kinds(args, KINDS[name])
    if name in GRAPH_FUNCTIONS:
        if type(args[1]) is not int or not all(isinstance(x, Node) for place, x in enumerate(args) if place != 1):
            return "expected the memory and its tensors as nodes and the site as a number"
        return None
    if name == "operator.getitem":
        return None if isinstance(args[0], Node) else "expected a node to index"
    if name == "operator.pow" and not (isinstance(args[1], (int, float)) and abs(args[1]) <= 16):
        return "expected an exponent of at most 16"
    if name == "torch.sym_sum" and isinstance(args[0], (list, tuple)):
        args = tuple(args[0])
    if not all(isinstance(argument, (Node, bool, int, float)) for argument in args):
        return "expected nodes and numbers"
    return None


def _check_kinds(args: tuple[Any, ...], kinds: str) -> str | None:
    """kinds: of each argument, `n` a node, `s` the number of a site, `l` a list of nodes."""
    for kind, value in zip(kinds, args, strict=True):
        nodes = isinstance(value, list) and all(isinstance(x, Node) for x in value)
        if not {"n": isinstance(value, Node), "s": type(value) is int, "l": nodes}[kind]:
            return "expected nodes, the site as a number, and lists of nodes"
    return None


def _attributes(paths: Mapping[str, str], tensors: Mapping[str, Tensor], name: str) -> torch.nn.Module:
    """A tree of modules that holds the graph's tensors under their paths."""
    root = torch.nn.Module()
    for path, key in paths.items():
        attribute_path(path)
        if key not in tensors:
            raise ArtifactError(f"{name}: tensor {key[:80]!r} is not among the stored ones; the file was edited")
        *parents, leaf = path.split(".")
        module = root
        for part in parents:
            child = module._modules.get(part)
            if child is None:
                if part in _RESERVED or part in module._parameters or part in module._buffers:
                    raise ArtifactError(f"{name}: path {path!r} is not free at {part!r}; rename the module")
                child = torch.nn.Module()
                module.add_module(part, child)
            module = child
        if leaf in _RESERVED or leaf in module._modules:
            raise ArtifactError(f"{name}: path {path!r} is not free at {leaf!r}; rename the tensor")
        tensor = tensors[key]
        if isinstance(tensor, torch.nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor)
    return root
