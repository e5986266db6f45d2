"""Arguments of graph nodes to and from their JSON form, and whether an operator's schema accepts them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from semkv.artifact.schema import (
    DTYPE_NAMES,
    MAX_ARGUMENT_DEPTH,
    DeviceRef,
    DictRef,
    DtypeRef,
    LayoutRef,
    MemoryFormatRef,
    NodeRef,
    NonFinite,
    SliceRef,
    TupleRef,
)
from semkv.errors import ArtifactError

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
DTYPE_NAME = {dtype: name for name, dtype in DTYPES.items()}
MEMORY_FORMATS = {name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last")}
_FORMAT_NAME = {value: name for name, value in MEMORY_FORMATS.items()}


def encode(value: Any, device: torch.device, depth: int = 0) -> Any:
    """The JSON form of an argument; `device` is the one that the file calls `model`.

    Raises `ArtifactError` for a value that the form cannot hold, a symbolic size that is not a node among them.
    """
    if depth > MAX_ARGUMENT_DEPTH:
        raise ArtifactError(f"an argument is nested deeper than {MAX_ARGUMENT_DEPTH}; flatten it")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = _constant(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.dtype) and value in DTYPE_NAME:
        return {"dtype": DTYPE_NAME[value]}
    if isinstance(value, torch.device):
        return {"device": _device_name(value, device)}
    if value is torch.strided:
        return {"layout": "strided"}
    if isinstance(value, torch.memory_format) and value in _FORMAT_NAME:
        return {"memory_format": _FORMAT_NAME[value]}
    if isinstance(value, list):
        return [encode(item, device, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, device, depth + 1) for item in value]}
    if isinstance(value, slice):
        return {"slice": [encode(item, device, depth + 1) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: encode(item, device, depth + 1) for key, item in value.items()}}
    raise ArtifactError(
        f"argument {value!r:.200} is a {type(value).__name__}, which an artifact cannot hold; make it a number, a "
        "string, a dtype, a device, a node, or a list, tuple, slice or dict of these"
    )


def decode(value: Any, nodes: Mapping[str, Node], device: torch.device, depth: int = 0) -> Any:
    """The argument that a checked JSON form stands for; `nodes` are those that came before."""
    if depth > MAX_ARGUMENT_DEPTH:
        raise ArtifactError(f"an argument is nested deeper than {MAX_ARGUMENT_DEPTH}; the file was edited")

    def inner(items: list[Any]) -> list[Any]:
        return [decode(item, nodes, device, depth + 1) for item in items]

    match value:
        case NodeRef():
            if value.node not in nodes:
                raise ArtifactError(
                    f"it refers to {value.node[:80]!r}, which is not an earlier node; the file was edited"
                )
            return nodes[value.node]
        case DtypeRef():
            return DTYPES[value.dtype]
        case DeviceRef():
            return device if value.device == "model" else torch.device("cpu")
        case LayoutRef():
            return torch.strided
        case MemoryFormatRef():
            return MEMORY_FORMATS[value.memory_format]
        case NonFinite():
            return float(value.float)
        case TupleRef():
            return tuple(inner(value.tuple))
        case SliceRef():
            return slice(*inner(value.slice))
        case DictRef():
            return {key: decode(item, nodes, device, depth + 1) for key, item in value.mapping.items()}
        case list():
            return inner(value)
        case _:
            return value


def check_call(schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why an operator's schema does not accept the arguments, or None. Nodes are accepted wherever a value is."""
    arguments: list[Any] = schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        return f"{len(args)} positional arguments, expected at most {len(positional)}"
    given = dict(zip((argument.name for argument in positional), args))
    known = {argument.name: argument for argument in arguments}
    for name, value in kwargs.items():
        if name not in known:
            return f"argument {name[:80]!r} is not one of {', '.join(known)}"
        if name in given:
            return f"argument {name!r} is given twice"
        given[name] = value
    for name, argument in known.items():
        if name not in given:
            if not argument.has_default_value():
                return f"argument {name!r} is missing"
        elif not _accepts(argument.type, argument.N, given[name]):
            return f"argument {name!r} is {given[name]!r:.80}, expected {argument.type.str()}"
    return None


def _accepts(kind: Any, size: int | None, value: Any) -> bool:
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _accepts(kind.getElementType(), size, value)
    if isinstance(value, Node):
        return True
    if name == "ListType":
        element = kind.getElementType()
        if isinstance(value, (list, tuple)):
            return all(_accepts(element, None, item) for item in value)
        return size is not None and _accepts(element, None, value)
    check = _SCALARS.get(name)
    return check is not None and check(value)


_SCALARS: dict[str, Callable[[Any], bool]] = {
    # A number where a tensor is expected becomes one: aten.mul.Tensor(x, 0.5).
    "TensorType": lambda value: isinstance(value, (int, float)),
    # A dtype, a layout and a memory format are ints to an operator's schema.
    "IntType": lambda value: isinstance(value, (int, torch.dtype, torch.layout, torch.memory_format)),
    "SymIntType": lambda value: isinstance(value, int),
    "FloatType": lambda value: isinstance(value, (int, float)),
    "NumberType": lambda value: isinstance(value, (int, float)),
    "BoolType": lambda value: isinstance(value, bool),
    "StringType": lambda value: isinstance(value, str),
    "DeviceObjType": lambda value: isinstance(value, torch.device),
}


def _constant(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool:
    for read in ("maybe_as_int", "maybe_as_float", "maybe_as_bool"):
        try:
            constant = getattr(value.node, read)()
        except (AttributeError, NotImplementedError):
            continue
        if constant is not None:
            return constant
    raise ArtifactError(
        f"argument {value} is a symbolic size outside the graph; make the node that computes it the argument"
    )


def _device_name(found: torch.device, model: torch.device) -> str:
    if found.type == model.type:
        return "model"
    if found.type == "cpu":
        return "cpu"
    raise ArtifactError(f"device {found} in a graph whose tensors are on {model}; keep one model on one device")
