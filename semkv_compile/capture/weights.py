"""Weights that no program can read, refused by the name of the module that holds them, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from semkv.errors import CaptureError
from semkv.model.plain_tensors import wraps

REMOVE_HOOKS = "accelerate.hooks.remove_hook_from_module(model, recurse=True)"


def check_weights(model: nn.Module) -> None:
    """Raise `CaptureError` for the first module whose weights are not tensors that are here: TorchScript, packed, offloaded,
    sharded, or on several devices.

    Tensors that wrap plain ones (`semkv.model.plain_tensors`) are none of these.
    """
    for path, module in model.named_modules():
        for check in (_script, _packed, _moving, _sharded, _hooked):
            if problem := check(module):
                raise CaptureError(f"{_name(path, module)} {problem}")
        for name, tensor in _held(module):
            if problem := _unreadable(tensor):
                raise CaptureError(f"{_name(path, module)}: its weight {name!r} is {problem}")
    _check_devices(model)


def _name(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters and buffers."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _script(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, which hides its computation; compile the model that it was made from"
    return None


def _packed(module: nn.Module) -> str | None:
    packed = [name for name, value in vars(module).items() if isinstance(value, torch.ScriptObject)]
    if packed:
        return (
            f"keeps its weights packed in {packed[0]!r} (torch.ao.quantization, quantize_dynamic for one), where no graph can "
            "read them; quantise with torchao instead: torchao.quantization.quantize_(model, Int8WeightOnlyConfig())"
        )
    return None


def _moving(module: nn.Module) -> str | None:
    """Mappings in place of a module's parameters, that bring them from somewhere each time that they are asked for."""
    held = vars(module)["_parameters"]
    if isinstance(held, dict):
        return None
    package = type(held).__module__.partition(".")[0]
    return (
        f"keeps its parameters in a {type(held).__name__} of {package}, which moves them when they are asked for; load the model in "
        "another format, torchao's for one"
    )


def _sharded(module: nn.Module) -> str | None:
    if (
        type(module).__module__.startswith("torch.distributed.fsdp")
        and type(module).__name__ == "FullyShardedDataParallel"
    ):
        return "shards its weights over processes; load the model whole in one process"
    return None


def _hooked(module: nn.Module) -> str | None:
    """Hooks of accelerate that leave weights where they are change nothing; the others bring them for each call."""
    hook = vars(module).get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False):
            return (
                "has its weights offloaded by accelerate, to host memory or disk, from where each call loads them; load the "
                "model without device_map and offload, or with a device_map that names one device and leaves it room"
            )
        if type(one).__module__.startswith("accelerate.") and type(one).__name__ not in (
            "AlignDevicesHook",
            "ModelHook",
        ):
            return f"has a {type(one).__name__} of accelerate, which changes weights when it runs; remove it: {REMOVE_HOOKS}"
    return None


def _unreadable(tensor: Tensor) -> str | None:
    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed."):
        return f"a {kind.__name__}, sharded over processes; load the model whole in one process"
    if tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_nested:
        form = tensor.dtype if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
        return f"a {kind.__name__} in the form {form}; expected dense numbers: use its dequantize() or to_dense()"
    if _of_its_own(kind) and not wraps(tensor):
        return (
            f"a {kind.__name__}, which computes in its own way and does not say what tensors it is made of "
            "(__tensor_flatten__); load the model in another format, torchao's for one"
        )
    return None


def _of_its_own(kind: type) -> bool:
    """Whether a class of tensors changes what operators do with it."""
    plain: tuple[Callable, ...] = (
        *(each.__torch_function__ for each in (Tensor, nn.Parameter)),
        *(each.__torch_dispatch__ for each in (Tensor, nn.Parameter)),
    )
    functions = {getattr(each, "__func__", each) for each in plain}
    own = (kind.__torch_function__, kind.__torch_dispatch__)
    return any(getattr(each, "__func__", each) not in functions for each in own)


def _check_devices(model: nn.Module) -> None:
    first: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        (here, one), (there, other), *_ = first.items()
        raise CaptureError(
            f"the model's weights are on several devices: {one!r} on {here}, {other!r} on {there}; load it on one, with "
            f"device_map={{'': {str(here)!r}}} or model.to({str(here)!r})"
        )


__all__ = ["check_weights"]
