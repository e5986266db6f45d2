"""Modules that only run another one: what is compiled is the model inside."""

from __future__ import annotations

from torch import nn

INNER = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",  # torch.compile(model)
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
}
"""By module and name of the class: where the model is. By name, since importing them takes a second."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in `torch.compile(model)`, `DataParallel(model)` and `DistributedDataParallel(model)`, at any depth; else `model`."""
    while isinstance(model, nn.Module) and (place := INNER.get((type(model).__module__, type(model).__name__))):
        model = model.get_submodule(place)
    return model


__all__ = ["unwrapped"]
