"""What a captured program depends on, as one digest: the model's code, settings and tensors.

A plain module is more than its weights: numbers in attributes, functions that were replaced, hooks. All of it counts, and a
model of which a part cannot be read as data has no identity rather than a doubtful one.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from semkv.errors import CaptureError
from semkv.model.plain_tensors import Wrapper, plain_tensors, wraps

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)

IGNORED = frozenset(
    {
        *("_parameters", "_buffers", "_modules", "generation_config", "name_or_path", "_name_or_path", "_load_config"),
        *("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_weight_conversions", "transformers_version"),
        *("_hf_hook", "hf_quantizer", "_compiled_call_impl", "extra_repr"),
        *("to", "cuda", "xpu", "npu", "mlu", "musa", "sdaa"),  # accelerate puts functions that warn there
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)
"""Attributes that no forward reads, or that are looked at apart."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

MAX_DEPTH = 8


def model_identity(model: nn.Module) -> str:
    """SHA-256 of what a capture of `model` reads beside its parameters' values, which `model_fingerprint` is for.

    Code (bytecode of the Python modules that define its layers), attributes and configuration of every layer, names, shapes and
    dtypes of parameters, and the values of buffers. Equal models in equal environments agree between processes.

    Raises
    ------
    CaptureError: a layer has hooks, or an attribute that is no plain data; the message names it.
    """
    digest = hashlib.sha256()
    types: set[type] = set()
    if (hooks := nn.modules.module)._global_forward_hooks or hooks._global_forward_pre_hooks:
        raise CaptureError("there are hooks for all modules, whose code is not known; remove them")
    for path, module in model.named_modules(remove_duplicate=False):
        if any(getattr(module, name, None) for name in HOOKS):
            raise CaptureError(f"module {path!r} has hooks, whose code is not known; remove them")
        types.add(type(module))
        digest.update(f"\n{path} {type(module).__module__}.{type(module).__qualname__}".encode())
        for name in sorted(vars(module).keys() - IGNORED):
            digest.update(f"{name}={_text(vars(module)[name], f'{path}.{name}')};".encode())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} {parameter.device.type};".encode())
        if wraps(parameter):
            library = sys.modules[type(parameter).__module__.split(".")[0]]
            version = getattr(library, "__version__", "")
            digest.update(f"{library.__name__} {version} {_text(Wrapper.of(parameter), name)};".encode())
    for name, buffer in model.named_buffers(remove_duplicate=False):
        digest.update(f"{name} {_text(buffer, name)};".encode())
    for line in sorted(_code_of(types)):
        digest.update(line.encode())
    return digest.hexdigest()


def _text(value: Any, place: str, depth: int = 0) -> str:
    """A value as text that is the same in another process."""
    if depth > MAX_DEPTH:
        raise CaptureError(f"{place} is nested more than {MAX_DEPTH} deep; expected plain settings")
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor) and wraps(value):
        return f"{_text(Wrapper.of(value), place, depth + 1)} {_text(dict(plain_tensors('', value)), place, depth + 1)}"
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    if isinstance(value, dict):
        items = sorted((_text(k, place, depth + 1), _text(v, place, depth + 1)) for k, v in value.items())
        return f"{{{items}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{[_text(item, place, depth + 1) for item in value]}"
    if isinstance(value, (set, frozenset)):
        return f"set{sorted(_text(item, place, depth + 1) for item in value)}"
    if isinstance(value, nn.Module):
        return f"module {type(value).__qualname__}"  # its own attributes are read where it is a layer
    if isinstance(value, MethodType) and isinstance(value.__func__, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_code(value.__func__.__code__)}"
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return f"{value.__module__}.{value.__qualname__} {_code(value.__code__)}"
    if (
        isinstance(value, BuiltinFunctionType)
        and getattr(sys.modules.get(value.__module__), value.__name__, None) is value
    ):
        return f"{value.__module__}.{value.__qualname__}"  # compiled: what it does goes by the versions, which count as well
    if isinstance(value, functools.partial):
        return f"partial {_text([value.func, value.args, value.keywords], place, depth + 1)}"
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(getattr(value, "to_dict", None)):
        own = {name: item for name, item in vars(value).items() if name not in IGNORED}
        return f"{type(value).__module__}.{type(value).__qualname__} {_text(own, place, depth + 1)}"
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in fields(value)}
        return f"{type(value).__module__}.{type(value).__qualname__} {_text(own, place, depth + 1)}"
    raise CaptureError(f"{place} is a {type(value).__name__}, which cannot be read as data")


def _code_of(types: set[type]) -> Iterator[str]:
    """A line for each function of the Python modules that define `types` and what they derive from."""
    names = {base.__module__ for kind in types for base in kind.__mro__}
    for name in names:
        library = name.split(".")[0] in ("torch", "builtins", "abc", "typing")  # their versions count instead
        if library or (name.startswith("transformers.") and not name.startswith("transformers.models.")):
            continue
        module = sys.modules.get(name)
        for place, function in _functions(module) if module is not None else ():
            yield f"{name}.{place} {_code(function.__code__)}"


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Functions and methods that a Python module names, those that decorators wrap included."""
    for name, value in vars(module).items():
        members = vars(value).items() if isinstance(value, type) else ((None, value),)
        for member, held in members:
            function = getattr(held, "fget", None) or getattr(held, "__func__", held)
            depth = 0
            while isinstance(function, FunctionType):
                yield f"{name}.{member}.{depth}", function
                function, depth = getattr(function, "__wrapped__", None), depth + 1


def _code(code: CodeType) -> str:
    """A function's bytecode, names and constants, without places in its file."""
    constants = [
        _code(x) if isinstance(x, CodeType) else repr(sorted(map(repr, x)) if isinstance(x, frozenset) else x)
        for x in code.co_consts
    ]
    text = f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
    return hashlib.sha256(text.encode()).hexdigest()
