"""Programs are understood on CPU tensors and then moved to where they run.

Passes evaluate parts of a graph on small inputs that they make themselves. On the CPU alone, no such input meets a weight of
another device, and a graph says the same whatever device its model was on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from semkv.errors import ConfigError
from semkv.ir.graph import copy_graph_module
from semkv.ir.program import Program
from semkv.ir.recurrence import Pieces, held_pieces
from semkv.model.plain_tensors import plain_tensors

Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def usable(device: str | torch.device) -> torch.device:
    """`device` as torch names it, after one allocation on it; `ConfigError` where there is none."""
    try:
        return torch.empty(0, dtype=torch.float32, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"device {str(device)!r} cannot be used here ({cause}); pass 'cpu' or a device that is"
        ) from error


def on_cpu(model: nn.Module) -> tuple[nn.Module, dict[Key, Tensor]]:
    """A copy of the model on the CPU, and the model's own tensors by the identity of their copies.

    The model itself, and nothing, where it is on the CPU already. No second copy is made on the model's device. The copy is without
    accelerate's hooks, which would send what it computes to that device.
    """
    if device_of(model).type in ("cpu", "meta"):
        return model, {}
    memo: dict[int, object] = {}
    originals: dict[Key, Tensor] = {}
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        for tensor in held:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                twin = tensor.detach().cpu()
                if isinstance(tensor, nn.Parameter):
                    twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
                memo[id(tensor)] = twin
                for (_, inner), (_, original) in zip(plain_tensors("", twin), plain_tensors("", tensor)):
                    originals[_key(inner)] = original
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if vars(module).pop("_hf_hook", None) is not None:
            vars(module)["forward"] = vars(module).pop("_old_forward")
    return copied, originals


def moved(program: Program, device: str | torch.device, originals: Mapping[Key, Tensor] | None = None) -> Program:
    """The program with its tensors on `device`, and every device that its graphs name replaced by it.

    originals: tensors on `device` to be shared in the place of their CPU copies, as `on_cpu` returns them. Tied tensors stay
    tied. For programs that are not lowered yet.
    """
    device = torch.device(device)
    done: dict[Key, Tensor] = dict(originals or {})
    bodies: dict[int, Pieces] = {}
    head = None if program.head is None else _moved_graph(program.head, device, done, bodies)
    return program.evolve(body=_moved_graph(program.body, device, done, bodies), head=head)


def _moved_graph(
    module: GraphModule, device: torch.device, done: dict[Key, Tensor], bodies: dict[int, Pieces]
) -> GraphModule:
    result = copy_graph_module(module)
    for node in result.graph.nodes:
        node.args = map_aggregate(node.args, lambda x: device if isinstance(x, torch.device) else x)
        node.kwargs = map_aggregate(node.kwargs, lambda x: device if isinstance(x, torch.device) else x)
    for owner in result.modules():
        for container in (owner._parameters, owner._buffers):
            for name, tensor in container.items():
                if tensor is not None:
                    container[name] = _moved_tensor(tensor, device, done)
    for path, pieces in held_pieces(result).items():
        key = id(pieces)
        if key not in bodies:
            bodies[key] = pieces.mapped(lambda graph: _moved_graph(graph, device, done, bodies))
        setattr(result, path, bodies[key])
    result.recompile()
    return result


def _moved_tensor(tensor: Tensor, device: torch.device, done: dict[Key, Tensor]) -> Tensor:
    key = _key(tensor)
    if key not in done:
        there = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, requires_grad=tensor.requires_grad)
        done[key] = there
    return done[key]


def _key(tensor: Tensor) -> Key:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


__all__ = ["device_of", "moved", "on_cpu", "usable"]
