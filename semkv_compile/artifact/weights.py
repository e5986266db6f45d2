"""A program's tensors as storages that are written once, and as views of those on the way back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from semkv.artifact.schema import Strict
from semkv.errors import ArtifactError
from semkv.io.tensor_file import TensorEntry


class TensorView(Strict):
    """How a program's tensor lies in a stored one.

    stored: name in weights.safetensors. shape, stride: in elements; no stride: the stored tensor as it is.
    offset: elements of the stored tensor, seen flat, before the first.
    """

    stored: str = Field(max_length=400)
    kind: Literal["parameter", "buffer"]
    shape: list[int] = Field(max_length=16)
    stride: list[int] | None = Field(default=None, max_length=16)
    offset: int = Field(default=0, ge=0)


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, TensorView]]:
    """Split tensors into what is stored and how each lies in it.

    Tensors of one dtype that share memory (tied or sliced weights) are stored once: the elements from the first to the
    last that any of them uses. A dense tensor keeps its strides, so that the loaded model multiplies in the same order.
    """
    stored: dict[str, Tensor] = {}
    views: dict[str, TensorView] = {}
    for names in _sharing(tensors):
        members = [tensors[name] for name in names]
        first = members[0]
        same = all(_place(member) == _place(first) for member in members)
        if same and (first.is_contiguous() or not _dense(first)):
            stored[names[0]] = first
            for name in names:
                views[name] = TensorView(stored=names[0], kind=_kind(tensors[name]), shape=list(first.shape))
            continue
        begin = min(member.storage_offset() for member in members)
        end = max(member.storage_offset() + _extent(member) for member in members)
        stored[names[0]] = first.detach().as_strided((end - begin,), (1,), begin)
        for name, member in zip(names, members):
            views[name] = TensorView(
                stored=names[0],
                kind=_kind(member),
                shape=list(member.shape),
                stride=list(member.stride()),
                offset=int(member.storage_offset() - begin),
            )
    return stored, views


def _sharing(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names in groups whose tensors overlap in memory; a file of weights mapped into one storage is many groups."""
    by_storage: dict[tuple[object, ...], list[str]] = {}
    groups: list[list[str]] = []
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise ArtifactError(f"tensor {name!r} has no data (device meta); load the model's weights before saving")
        if tensor.numel() == 0 or tensor.numel() > _extent(tensor):
            groups.append([name])  # nothing to share, or an expanded tensor, which is written out
        else:
            key = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.dtype)
            by_storage.setdefault(key, []).append(name)
    for names in by_storage.values():
        end = -1
        for name in sorted(names, key=lambda name: tensors[name].storage_offset()):
            begin = int(tensors[name].storage_offset())
            if begin >= end:
                groups.append([])
            groups[-1].append(name)
            end = max(end, begin + _extent(tensors[name]))
    return groups


def check_views(views: Mapping[str, TensorView], stored: Mapping[str, TensorEntry], name: str) -> None:
    """Raise `ArtifactError` unless every view lies within its stored tensor; `name` is the file, for the message."""
    for key, view in views.items():
        problem = None
        entry = stored.get(view.stored)
        if entry is None:
            problem = f"tensor {view.stored[:80]!r} is not in weights.safetensors"
        elif view.stride is None:
            if tuple(view.shape) != entry.shape or view.offset != 0:
                problem = f"shape {view.shape} at {view.offset}, expected {list(entry.shape)} at 0"
        elif len(view.stride) != len(view.shape) or not all(0 <= size < 2**62 for size in (*view.shape, *view.stride)):
            problem = f"shape {view.shape} with strides {view.stride}"
        else:
            size = (entry.end - entry.begin) // entry.dtype.itemsize
            last = view.offset + sum((count - 1) * step for count, step in zip(view.shape, view.stride))
            if 0 in view.shape or last >= size or math.prod(view.shape) > size:
                problem = f"shape {view.shape} with strides {view.stride} from {view.offset} on, in {size} elements"
        if problem is not None:
            raise ArtifactError(
                f"{name}: tensor {key[:80]!r}: {problem}; the file is damaged or was edited, save it again"
            )


def unpack(stored: Mapping[str, Tensor], views: Mapping[str, TensorView]) -> dict[str, Tensor]:
    """The program's tensors; those with the same view of the same storage are one object. `check_views` came before."""
    made: dict[tuple[object, ...], Tensor] = {}
    result = {}
    for name, view in views.items():
        base = stored[view.stored]
        key = (view.stored, view.kind, tuple(view.shape), tuple(view.stride or ()), view.offset)
        if key not in made:
            tensor = base
            if view.stride is not None:
                tensor = base.reshape(-1).as_strided(view.shape, view.stride, view.offset)
            made[key] = torch.nn.Parameter(tensor, requires_grad=False) if view.kind == "parameter" else tensor
        result[name] = made[key]
    return result


def _kind(tensor: Tensor) -> Literal["parameter", "buffer"]:
    return "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _extent(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last in storage, inclusive."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride()))


def _dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill their extent, each place once."""
    return _extent(tensor) == tensor.numel()
