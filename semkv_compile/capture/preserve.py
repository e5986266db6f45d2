"""Leave the user's model as it was found: tracing runs its Python, which may assign attributes and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from semkv.model.wrappers import unwrapped

CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """On exit, every module has the attributes, parameters, buffers and configuration values that it had on entry. Until then, modules
    that `torch.compile` was given run as they are: nothing is compiled for a comparison.

    Tensors are restored by identity, buffers by value as well: what is run on real tensors may write to them.
    """
    before = [(module, _snapshot(module)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    configs = {id(c): (c, dict(vars(c))) for m in model.modules() if (c := _config(m)) is not None}
    for module in model.modules():
        _run_plainly(module)
    try:
        yield
    finally:
        for module, (attributes, containers) in before:
            _restore(module.__dict__, attributes)
            for name, content in containers.items():
                container = module.__dict__[name]
                container.clear()
                container.update(content)
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        for config, attributes in configs.values():
            _restore(vars(config), attributes)


def _run_plainly(module: nn.Module) -> None:
    inner = unwrapped(module)
    if inner is not module:
        module.__dict__["forward"] = inner.__call__  # torch.compile(module)
    if module.__dict__.get("_compiled_call_impl") is not None:
        module.__dict__["_compiled_call_impl"] = None  # module.compile()


def _config(module: nn.Module) -> Any:
    config = module.__dict__.get("config")
    return config if hasattr(config, "__dict__") else None


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    held = {name: module.__dict__[name] for name in CONTAINERS if name in module.__dict__}
    containers = {name: x.copy() for name, x in held.items() if isinstance(x, (dict, set))}
    return dict(module.__dict__), containers


def _restore(current: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in [name for name in current if name not in wanted]:
        del current[name]
    for name, value in wanted.items():
        if current.get(name) is not value:
            current[name] = value
