"""What a stored graph may call: a closed set of Python functions, and operators that pass a rule.

A file names an operator; this module decides whether the name may be used. Nothing is imported or looked up by a path
that a file gives. Operators compute on tensors and numbers: those that touch files, processes, storages or streams are
out, and so are private ATen operators (which trust their arguments) except the few that captured decoders contain.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Callable
from functools import cache

import torch
from torch._ops import OpOverload, OpOverloadPacket

import semkv.ir.ops  # noqa: F401  (registers the semkv operators)
from semkv.errors import ArtifactError
from semkv.ir.memory import GRAPH_FUNCTIONS
from semkv.ir.recurrence import recur


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNARY: dict[str, Callable] = {
    "operator.neg": operator.neg,
    "operator.pos": operator.pos,
    "operator.abs": operator.abs,
    "operator.not_": operator.not_,
    "operator.invert": operator.invert,
    "operator.index": operator.index,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "math.sqrt": math.sqrt,
    "math.log": math.log,
    "math.exp": math.exp,
    "torch.sym_int": torch.sym_int,
    "torch.sym_float": torch.sym_float,
    "torch.sym_not": torch.sym_not,
    "torch.sym_sum": torch.sym_sum,
}
BINARY: dict[str, Callable] = {
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
    "operator.truediv": operator.truediv,
    "operator.mod": operator.mod,
    "operator.pow": operator.pow,
    "operator.and_": operator.and_,
    "operator.or_": operator.or_,
    "operator.xor": operator.xor,
    "operator.eq": operator.eq,
    "operator.ne": operator.ne,
    "operator.lt": operator.lt,
    "operator.le": operator.le,
    "operator.gt": operator.gt,
    "operator.ge": operator.ge,
    "operator.getitem": operator.getitem,
    "builtins.max": max,
    "builtins.min": min,
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
}
TERNARY: dict[str, Callable] = {"torch.sym_ite": torch.sym_ite}

KINDS = {
    "semkv.recurrence": "nsll",
    "semkv.memory.advance": "nsnll",
    "semkv.memory.read_states": "ns",
    "semkv.memory.write_states": "nsl",
    "semkv.memory.read_chosen": "nnnss",
    "semkv.memory.chosen_among": "nn",
    "semkv.memory.read_chunk": "nnsss",
    "semkv.memory.chunk_among": "ns",
    "semkv.memory.embedded": "nn",
    "semkv.memory.entering": "nsn",
    "semkv.memory.rotary": "nns",
}
"""Functions of recurrent sites and of what a prompt brings, with the kinds of their arguments: `n` a node, `s` a number, of a site or
of axes, `l` a list of nodes."""

FUNCTIONS: dict[str, Callable] = {**UNARY, **BINARY, **TERNARY, **GRAPH_FUNCTIONS, "semkv.recurrence": recur}
"""Python functions a graph may call, by the name under which a file stores them."""

ARITY: dict[str, int] = {
    **dict.fromkeys(UNARY, 1),
    **dict.fromkeys(BINARY, 2),
    **dict.fromkeys(TERNARY, 3),
    **dict.fromkeys(GRAPH_FUNCTIONS, 6),
    "semkv.memory.observe": 3,
    **{name: len(kinds) for name, kinds in KINDS.items()},
}

NAMESPACES = {"aten": None, "semkv": None, "prims": "torch._prims", "transformers": "transformers.integrations.moe"}
"""Operator namespaces, and the module that registers each where importing torch and semkv does not."""

FACTORIES = _names(
    """
    arange empty empty_permuted empty_strided eye full linspace logspace ones scalar_tensor tril_indices
    triu_indices zeros sym_constrain_range sym_constrain_range_for_size
    """
)
"""ATen operators allowed though none of their arguments is a tensor."""

PRIVATE = _names(
    """
    _aminmax _assert_async _assert_scalar _assert_tensor_metadata _cast_Float _cast_Half _cast_Long _conj
    _conj_physical _fused_rms_norm _grouped_mm _int_mm _local_scalar_dense _log_softmax _prelu_kernel _reshape_copy
    _safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _scaled_mm
    _shape_as_tensor _softmax _stack _to_copy _unsafe_index _unsafe_index_put _unsafe_view
    """
)
"""ATen operators allowed though their names begin with one underscore."""

FORBIDDEN = _names(
    """
    from_file set set_ resize resize_ resize_as resize_as_ resize_as_sparse resize_as_sparse_ record_stream
    as_strided_ swap_tensors
    """
)
"""ATen operators that reach beyond their tensors: files, other storages, sizes of existing storages, streams."""

STRINGS = _names("approximate assert_msg equation indexing kernel mode norm ord p padding reduce rounding_mode side")
"""Names of string arguments that only choose among an operator's behaviours."""

_KINDS = re.compile(r"(Tensor|Scalar|int|bool|float|str|Device)\??(\[\d*\])?\??")
_UNSET_KINDS = frozenset({"Generator?", "Storage?", "Stream?"})
_NAME = re.compile(r"([a-z_]+)::(\w{1,100})\.(\w{1,100})")
_BY_FUNCTION = {function: name for name, function in FUNCTIONS.items()}


def target_name(target: object) -> str:
    """The name under which a graph file stores a call target; `ArtifactError` where it has none."""
    if isinstance(target, OpOverload):
        name = f"{target._schema.name}.{target._overloadname}"
        if target.namespace not in NAMESPACES:
            raise ArtifactError(
                f"the graph calls {name}, an operator of the library {target.namespace!r}, which an artifact cannot bring along; run the "
                "compiled model without saving it, or quantise with torchao: torchao.quantization.quantize_(model, Int8WeightOnlyConfig())"
            )
        resolve(name)
        return name
    try:
        return _BY_FUNCTION[target]  # type: ignore[index]
    except (KeyError, TypeError):
        raise ArtifactError(
            f"call of {target!r}: an artifact can hold calls of {', '.join(NAMESPACES)} operators and of "
            f"{len(FUNCTIONS)} functions of operator, math, torch.sym_* and semkv.ir.memory; rewrite the graph in those"
        ) from None


@cache
def resolve(name: str) -> OpOverload | Callable:
    """The operator or function that a file calls `name`; `ArtifactError` where there is none or it is not allowed."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in NAMESPACES:
        raise ArtifactError(
            f"target {name[:120]!r}: expected namespace::operator.overload with a namespace of {', '.join(NAMESPACES)} "
            "or one of the listed functions; the file is damaged, was edited, or needs a newer semkv"
        )
    namespace, operator_name, overload_name = match.groups()
    if (module := NAMESPACES[namespace]) is not None:
        importlib.import_module(module)
    packet = getattr(getattr(torch.ops, namespace), operator_name, None)
    overload = getattr(packet, overload_name, None) if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(overload, OpOverload):
        raise ArtifactError(
            f"operator {name!r} does not exist in torch {torch.__version__}; use the versions that the manifest names"
        )
    reason = refusal(overload)
    if reason is not None:
        raise ArtifactError(f"operator {name!r} may not be in an artifact: {reason}")
    return overload


def refusal(overload: OpOverload) -> str | None:
    """Why an operator may not be in an artifact; None where it may."""
    schema = overload._schema
    namespace, name = schema.name.split("::")
    if namespace not in NAMESPACES:
        return f"namespace {namespace!r} is not one of {', '.join(NAMESPACES)}"
    if name.startswith("_") and not name.startswith("__") and name not in PRIVATE:
        return "private operators do not check their arguments"
    if namespace == "aten":
        if name in FORBIDDEN:
            return "it reaches beyond its tensors"
        if name not in FACTORIES and not any("Tensor" in str(argument.type) for argument in schema.arguments):
            return "it takes no tensor"
    for argument in schema.arguments:
        kind = argument.type.str() if hasattr(argument.type, "str") else str(argument.type)
        if argument.is_out:
            return f"it writes its result into argument {argument.name!r}"
        if kind in _UNSET_KINDS:
            continue
        if not _KINDS.fullmatch(kind):
            return f"argument {argument.name!r} is a {kind}"
        if kind.startswith("str") and argument.name not in STRINGS:
            return f"argument {argument.name!r} is a free string"
    return None
