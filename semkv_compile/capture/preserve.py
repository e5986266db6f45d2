"""Leave the user's model as it was found: tracing runs its Python, which may assign attributes and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """On exit, every module has the attributes, parameters, buffers and configuration values that it had on entry.

    Tensors are restored by identity, buffers by value as well: what is run on real tensors may write to them.
    """
    before = [(module, _snapshot(module)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    configs = {id(c): (c, dict(vars(c))) for m in model.modules() if (c := _config(m)) is not None}
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


def _config(module: nn.Module) -> Any:
    config = module.__dict__.get("config")
    return config if hasattr(config, "__dict__") else None


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    containers = {name: module.__dict__[name].copy() for name in CONTAINERS if name in module.__dict__}
    return dict(module.__dict__), containers


def _restore(current: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in [name for name in current if name not in wanted]:
        del current[name]
    for name, value in wanted.items():
        if current.get(name) is not value:
            current[name] = value
